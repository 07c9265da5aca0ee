"""`EvalContext` and `InferContext`: outputs of a model in a custom loop; they change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from karvan import checkpoint as checkpoints
from karvan.label_columns import required_values
from karvan.train.assembly import ModelSetup, make_model_setup
from karvan.train.checks.common_mistakes import check_data
from karvan.train.contexts.context_loader import ContextLoader
from karvan.train.contexts.model_outputs import Labels, full, labels_of, names_of
from karvan.train.evaluation import evaluating
from karvan.train.feed.feed import Feed
from karvan.train.state.randomness import same_random_state_afterwards
from karvan.train.state.train_state import check_fits
from karvan.train.state.transforms import Transforms


class EvalContext:
    """Evaluates a model: `with kv.EvalContext(model) as ctx: output, labels = ctx.forward(batch)`.

    Inside of it the model is in eval mode; afterwards the mode of every module and the state of random
    generators are restored. No row is inserted, and keys without a row give zeros. label, precision, device
    and prefetch: see `TrainContext`, whose `eval()` gives an EvalContext of its model.

    With several ranks each takes its share of the data, and all call `forward` equally often: for every batch
    of a loader. When the data of a rank has ended, its loader takes part for it until that of all has.
    """

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
        """A context that runs a model with the parts of another one."""
        context = cls.__new__(cls)
        context._begin(runs, transforms, label)
        return context

    def _begin(self, runs: ModelSetup, transforms: Transforms, label: Labels) -> None:
        self._runs = runs
        self._transforms = transforms
        self._label = label
        self._stack: ExitStack | None = None
        self._feed: Feed | None = None
        self._loader_batch: Any = None  # the batch that the loader gave last
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
        found, self._feed, self._loader_batch = self._feed, None, None
        assert stack is not None
        with stack:
            if found is not None:
                found.__exit__(kind, error, trace)

    def loader(self, data: Iterable[Any]) -> ContextLoader:
        """The batches of data, taken and prepared in advance."""
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
                    self._loader_batch = fed.batch
                    if fed.samples or runs.connection.world_size == 1:
                        yield fed.batch
                    else:  # it is only for the other ranks
                        runs.infer(fed.batch)
            finally:
                self._feed = self._loader_batch = None

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The output, in float32 where it was computed in half precision, and the labels of a batch."""
        output, used = self._output("forward", batch)
        return output, labels_of(used, self._label, self.device)

    def _output(self, method: str, batch: Any) -> tuple[Any, Any]:
        self._require(method)
        if batch is not self._loader_batch:  # it may not be the loader's
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
    """Predicts with a model: `with kv.InferContext(model, "run") as ctx: output = ctx.predict(batch)`.

    checkpoint is a checkpoint, or a run's folder, of which it loads the newest; without it, the model and its
    rows are used as they are, for instance on parameter servers that hold them already. Transforms of data
    passed to `loader` take their statistics from it. It needs no optimizer, and ignores the optimizer state
    in the checkpoint. Rows in memory belong to this process; on parameter servers a checkpoint replaces the
    content of the tables. Nothing is ever inserted.
    """

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
            check_fits(model, state, found.path)
            model.load_state_dict(state["model"])
            self._transforms.load(state)
            self.step = found.step

    def predict(self, batch: Any) -> Any:
        """The output for a batch, on the model's device; half precision is given as float32."""
        return self._output("predict", batch)[0]
