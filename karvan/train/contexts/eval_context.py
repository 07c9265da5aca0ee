"""`EvalContext` and `InferContext`: outputs of a model in your own loop; they change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from karvan import checkpoint as checkpoints
from karvan import distributed
from karvan.distributed import Connection
from karvan.label_columns import required_values
from karvan.train.checks.common_mistakes import check_data
from karvan.train.contexts.model_outputs import Labels, full, labels_of, names_of, precision_named
from karvan.train.contexts.step_passes import ContextLoader
from karvan.train.evaluation import evaluating
from karvan.train.feed.feed import Feed, ahead_of, feed, same
from karvan.train.feed.rank_rounds import RankRounds
from karvan.train.state.randomness import same_random_state_afterwards
from karvan.train.state.transforms import Transforms
from karvan.train.step.device_placement import Placement, device_of, exact_device, make_placement
from karvan.train.step.optimizer_step import engines_of
from karvan.train.step.precision import Precision, make_precision


@dataclass(frozen=True)
class Running:
    """What it takes to run a model on batches; a `TrainContext` has the same as its evaluations."""

    model: nn.Module
    device: torch.device
    connection: Connection
    precision: Precision
    placement: Placement
    ahead: int
    transforms: Transforms


def running(
    model: nn.Module, mixed_precision: bool | str, device: torch.device | str | None, ahead: int
) -> Running:
    """What it takes to run this model; it is moved to the device, if one is given."""
    connection = distributed.current()
    ahead = ahead_of(ahead, connection)
    where = device_of(model) if device is None else exact_device(device)
    name = precision_named(mixed_precision, where)
    moved = model if device is None else model.to(where)
    engines = engines_of(model)
    return Running(
        moved,
        where,
        connection,
        make_precision(name, where, engines),
        make_placement(moved, where, same, engines if ahead else []),
        ahead,
        Transforms(),
    )


class EvalContext:
    """Evaluates a model: `with kv.EvalContext(model) as ctx: output, labels = ctx.forward(batch)`.

    Inside of it the model is in eval mode; afterwards every module is in the mode it was in, and random
    generators are where they were. No row is inserted, and keys without one give zeros. label,
    mixed_precision, device and ahead: see `TrainContext`, whose `eval()` gives an EvalContext of its model.

    Of several ranks each takes its share of the data, and all call `forward` equally often: for every batch
    of a loader. Where the data of a rank has ended, its loader takes part for it until the others' has, too.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label: Labels = "label",
        mixed_precision: bool | str = False,
        device: torch.device | str | None = None,
        ahead: int = 2,
    ) -> None:
        self._begin(running(model, mixed_precision, device, ahead), label)
        for engine in engines_of(model):
            engine.hold_ahead(2 * self._running.ahead + 2)

    @classmethod
    def of(cls, running: Running, label: Labels) -> Self:
        """One that runs a model as another context does."""
        made = cls.__new__(cls)
        made._begin(running, label)
        return made

    def _begin(self, running: Running, label: Labels) -> None:
        self._running = running
        self._label = label
        self._stack: ExitStack | None = None
        self._feed: Feed | None = None
        self._given: Any = None  # the batch that the loader gave last
        self.model = running.model
        self.device = running.device

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
        run = self._running
        run.transforms.use(data)
        run.transforms.match_loaders()
        place = partial(run.placement.place, training=False)
        rounds = RankRounds(run.connection, "evaluate")
        required = required_values(data, names_of(self._label))
        with required, feed(data, place, ahead=run.ahead, rounds=rounds) as batches:
            self._feed = batches
            try:
                for fed in batches:
                    run.placement.receive(fed.batch)
                    self._given = fed.batch
                    if fed.rows or run.connection.world == 1:
                        yield fed.batch
                    else:  # it is for the others
                        self._run(fed.batch)
            finally:
                self._feed = self._given = None

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The output, in float32 where it was computed in halves, and the labels of a batch."""
        output, used = self._output("forward", batch)
        return output, labels_of(used, self._label, self.device)

    def _output(self, method: str, batch: Any) -> tuple[Any, Any]:
        self._require(method)
        if batch is not self._given:  # it may be from anywhere
            batch = self._running.placement.place(batch, training=False)
            self._running.placement.receive(batch)
        return self._run(batch), batch

    def _run(self, batch: Any) -> Any:
        run = self._running
        with torch.no_grad(), run.placement.forward(), run.precision.context(), run.precision.forward():
            return full(self.model(batch))

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

    def __init__(
        self,
        model: nn.Module,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        label: Labels = None,
        mixed_precision: bool | str = False,
        device: torch.device | str | None = None,
        ahead: int = 2,
    ) -> None:
        super().__init__(model, label=label, mixed_precision=mixed_precision, device=device, ahead=ahead)
        self.step: int | None = None  # that of the checkpoint
        if checkpoint is not None:
            found = checkpoints.find(checkpoint)
            state = found.load(model)
            if "model" not in state:
                raise checkpoints.CheckpointError.mismatch(found.path, "a model's state", ", ".join(state))
            model.load_state_dict(state["model"])
            self._running.transforms.load(state)
            self.step = found.step

    def predict(self, batch: Any) -> Any:
        """The output for a batch, on the model's device, in float32 where it was computed in halves."""
        return self._output("predict", batch)[0]
