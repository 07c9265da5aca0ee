"""`EvalContext` and `InferContext`: outputs of a model in your own loop; they change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from karvan import checkpoint as checkpoints
from karvan.former_names import former_arguments
from karvan.label_columns import required_values
from karvan.train.assembly import ModelSetup, make_model_setup
from karvan.train.checks.common_mistakes import check_data
from karvan.train.contexts.context_loader import ContextLoader
from karvan.train.contexts.model_outputs import Labels, full, labels_of, names_of
from karvan.train.evaluation import evaluating
from karvan.train.feed.feed import Feed
from karvan.train.state.randomness import same_random_state_afterwards
from karvan.train.state.transforms import Transforms


class EvalContext:
    """Evaluates a model: `with kv.EvalContext(model) as ctx: output, labels = ctx.forward(batch)`.

    Inside of it the model is in eval mode; afterwards every module is in the mode it was in, and random
    generators are where they were. No row is inserted, and keys without one give zeros. label,
    precision, device and prefetch: see `TrainContext`, whose `eval()` gives an EvalContext of its model.

    Of several ranks each takes its share of the data, and all call `forward` equally often: for every batch
    of a loader. Where the data of a rank has ended, its loader takes part for it until the others' has, too.
    """

    @former_arguments(mixed_precision="precision", ahead="prefetch")
    def __init__(
        self,
        model: nn.Module,
        *,
        label: Labels = "label",
        precision: str = "fp32",
        device: torch.device | str | None = None,
        prefetch: int = 2,
    ) -> None:
        self._begin(
            make_model_setup(model, precision=precision, device=device, prefetch=prefetch),
            Transforms(),
            label,
        )

    @classmethod
    def of(cls, runs: ModelSetup, transforms: Transforms, label: Labels) -> Self:
        """One that runs a model as another context does."""
        made = cls.__new__(cls)
        made._begin(runs, transforms, label)
        return made

    def _begin(self, runs: ModelSetup, transforms: Transforms, label: Labels) -> None:
        self._runs = runs
        self._transforms = transforms
        self._label = label
        self._stack: ExitStack | None = None
        self._feed: Feed | None = None
        self._given: Any = None  # the batch that the loader gave last
        self.model = runs.model
        self.device = runs.device

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError(f"This {type(self).__name__} has been entered already.")
        with ExitStack() as stack:
            stack.enter_context(same_random_state_afterwards())
            stack.enter_context(evaluating(self.model))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        found, self._feed, self._given = self._feed, None, None
        assert stack is not None
        with stack:
            if found is not None:
                found.__exit__(kind, error, trace)

    def loader(self, data: Iterable[Any]) -> ContextLoader:
        """The batches of data, taken and prepared ahead."""
        self._require("loader")
        check_data("loader", data)
        return ContextLoader(lambda: self._batches(data))

    def _batches(self, data: Iterable[Any]) -> Iterator[Any]:
        self._require("A loader")
        if self._feed is not None:
            raise RuntimeError(
                "Another loader of this context has not come to its end: expected one at a time."
            )
        runs = self._runs
        self._transforms.use(data)
        self._transforms.match_loaders()
        required = required_values(data, names_of(self._label))
        with required, runs.evaluation_feed(data) as batches:
            self._feed = batches
            try:
                for fed in batches:
                    runs.placement.receive(fed.batch)
                    self._given = fed.batch
                    if fed.rows or runs.connection.world_size == 1:
                        yield fed.batch
                    else:  # it is for the others
                        runs.infer(fed.batch)
            finally:
                self._feed = self._given = None

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The output, in float32 where it was computed in halves, and the labels of a batch."""
        output, used = self._output("forward", batch)
        return output, labels_of(used, self._label, self.device)

    def _output(self, method: str, batch: Any) -> tuple[Any, Any]:
        self._require(method)
        if batch is not self._given:  # it may be from anywhere
            batch = self._runs.placement.place(batch, training=False)
            self._runs.placement.receive(batch)
        return full(self._runs.infer(batch)), batch

    def _require(self, method: str) -> None:
        if self._stack is None:
            raise RuntimeError(
                f"{method} was called outside of the context: expected it inside of "
                f"`with {type(self).__name__}(…) as ctx:`."
            )


class InferContext(EvalContext):
    """Predicts by a model: `with kv.InferContext(model, "run") as ctx: output = ctx.predict(batch)`.

    checkpoint is one, or a run's folder, whose newest it takes; without it, the model and its rows are as
    they are, as on parameter servers that hold them already. Transforms of data that `loader` gets take their
    statistics from it. It needs no optimizer, and what optimizers had in the checkpoint is left there. Rows
    in memory are this process's own; on parameter servers a checkpoint takes the place of what the tables
    there hold. Nothing is ever inserted.
    """

    @former_arguments(mixed_precision="precision", ahead="prefetch")
    def __init__(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        label: Labels = None,
        precision: str = "fp32",
        device: torch.device | str | None = None,
        prefetch: int = 2,
    ) -> None:
        super().__init__(model, label=label, precision=precision, device=device, prefetch=prefetch)
        self.step: int | None = None  # that of the checkpoint
        if checkpoint is not None:
            found = checkpoints.find(checkpoint)
            state = found.load(model)
            if "model" not in state:
                raise checkpoints.CheckpointError.mismatch(found.path, "a model's state", ", ".join(state))
            model.load_state_dict(state["model"])
            self._transforms.load(state)
            self.step = found.step

    def predict(self, batch: Any) -> Any:
        """The output for a batch, on the model's device, in float32 where it was computed in halves."""
        return self._output("predict", batch)[0]
