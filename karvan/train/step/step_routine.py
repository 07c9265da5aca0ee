"""One step of training: forward, loss and backward of each of its batches, then clip and apply.

`Fit` and `TrainContext` both train by it. They differ in who computes the loss: a Trainer's loss is computed
inside of `forward`, in its precision, and that of a custom loop between `forward` and `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from karvan.train.losses import LogitCheck, Reported, collecting, named, nothing_of, total
from karvan.train.step.data_parallel import Parallel
from karvan.train.step.device_placement import Placement
from karvan.train.step.optimizer_step import OptimizerStep
from karvan.train.step.precision import Precision
from karvan.train.types import Loss, Losses

if TYPE_CHECKING:
    from karvan.train.epoch import Accumulation, Epoch
    from karvan.train.feed import FedBatch


@dataclass
class StepBatches:
    """The batches that make a step, their weights, and how many of them have been trained.

    epoch is where they were taken from; None for a batch that a custom loop has made itself.
    """

    group: list[FedBatch]
    weights: list[float]
    whole_weight: float
    epoch: Epoch | None = None
    done: int = 0

    def passes(self) -> Iterator[StepPass]:
        """One batch after the other; none is referenced once the next one is taken."""
        return (StepPass(self, index) for index in range(len(self.group)))


@dataclass
class StepPass:
    """One of a step's batches, the model's output for it, and its loss."""

    step: StepBatches
    index: int
    output: Any = None
    losses: Losses | None = None  # as the loss function gave them; None for a batch without samples
    loss: Tensor | None = None  # their sum
    root: Tensor | None = None  # what the backward starts from
    reported: Reported = field(default_factory=Reported)  # by the model

    @property
    def batch(self) -> Any:
        """The batch as the feed gave it."""
        return self.step.group[self.index].batch

    @property
    def weight(self) -> float:
        """Its weight; 0 without samples."""
        return self.step.weights[self.index]

    @property
    def last(self) -> bool:
        """Whether it completes the step."""
        return self.index == len(self.step.group) - 1


class LossMeans:
    """The weighted mean of each loss over the passes of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.weight = 0.0

    def add(self, losses: Mapping[str, Tensor], weight: float) -> None:
        """Count the losses of a pass."""
        for name, loss in losses.items():
            value = loss if weight == 1 else loss * weight
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self.weight += weight

    def means(self) -> dict[str, Tensor]:
        """The means; a NaN if nothing was counted."""
        if not self.weight:
            return {"loss": torch.tensor(torch.nan)}
        if self.weight == 1:
            return dict(self._sums)
        return {name: total / self.weight for name, total in self._sums.items()}


def see_nothing(output: Any, batch: Any) -> None:
    """Nobody needs the outputs of a step."""


@dataclass(frozen=True)
class StepRoutine:
    """Makes steps with these parts."""

    placement: Placement
    precision: Precision
    parallel: Parallel
    passes: Accumulation
    update: OptimizerStep
    late: bool = False  # whether a step may be skipped where only the device knows
    logits: LogitCheck = field(default_factory=LogitCheck)

    def begin(self, group: list[FedBatch], epoch: Epoch | None = None) -> StepBatches:
        """A step of these batches."""
        return StepBatches(group, *self.passes.weights(group), epoch)

    def gradients(
        self,
        step: StepBatches,
        loss: Loss,
        metrics: Iterable[str],
        see: Callable[[Any, Any], None] = see_nothing,
        divisor: float | None = None,
    ) -> LossMeans:
        """Compute the gradients of a step, batch by batch; its losses.

        see: gets the output of each batch that has samples, and the batch. metrics: see `losses_of`.
        """
        losses = LossMeans()
        for one_pass in step.passes():
            self.placement.receive(one_pass.batch)
            self.forward(one_pass, one_pass.batch, loss)
            self.backward(one_pass, divisor)
            if one_pass.losses is not None:
                see(one_pass.output, one_pass.batch)
                losses.add(self.losses_of(one_pass, metrics), one_pass.weight)
        return losses

    def forward(self, step_pass: StepPass, batch: Any, loss: Loss | None = None) -> None:
        """Compute the output for a batch on the model's device, and its loss unless that comes later."""
        with (
            self.parallel.passing(step_pass.last),
            self.precision.context(),
            self.placement.forward(),
            self.precision.forward(),
        ):
            with collecting() as step_pass.reported:
                step_pass.output = self.parallel.forward(batch)
            if loss is not None:
                if step_pass.weight:
                    self.logits.see(loss, step_pass.output)
                self.add_loss(step_pass, loss(step_pass.output, batch) if step_pass.weight else None)

    def add_loss(self, step_pass: StepPass, losses: Losses | None) -> Tensor:
        """Take the loss of an output, a mean over the batch; that of a batch without samples is 0."""
        step_pass.losses = losses if step_pass.weight else None
        step_pass.loss = nothing_of(step_pass.output) if step_pass.losses is None else total(step_pass.losses)
        step_pass.root = self.parallel.begin(step_pass.output, step_pass.loss)
        return step_pass.loss

    def losses_of(self, step_pass: StepPass, metrics: Iterable[str]) -> dict[str, Tensor]:
        """The losses of a pass by name, and what the model has reported, whose names no metric may have."""
        assert step_pass.losses is not None
        assert step_pass.loss is not None
        return named(step_pass.losses, step_pass.loss) | step_pass.reported.entries(metrics)

    def backward(self, step_pass: StepPass, divisor: float | None = None) -> None:
        """Add the gradients of a pass to those of its step, divided as the step needs, or by `divisor`."""
        assert step_pass.root is not None
        step = step_pass.step
        if divisor is None:
            divisor = self.passes.divisor(step_pass.weight, step.weights, step.whole_weight)
        with self.parallel.passing(step_pass.last), self.precision.context():
            self.update.backward(step_pass.root, divisor)
        step.done += 1

    def apply(self, step: StepBatches) -> bool | Tensor | None:
        """Clip the gradients of a complete step and apply them; see `OptimizerStep.apply`.

        A tensor on the device says whether the step was made, where only the device knows.
        """
        if not (self.passes.together or any(step.weights)):
            return self.update.pass_over()
        if self.late and (known_there := self.update.apply_late()) is not None:
            return known_there
        applied = self.update.apply()
        if applied is False:
            self.parallel.reduction.undo()
        return applied
