"""One step of training: forward, loss and backward of each of its batches, then clip and apply.

`Fit` and `TrainContext` both train by it. They differ in who computes the loss: a Trainer's loss is computed
inside of `forward`, in its precision, and that of a custom loop between `forward` and `backward`.
`StepOutcomes` knows which steps were taken and which skipped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from karvan.train.data_parallel import Parallel
from karvan.train.device_placement import Placement
from karvan.train.losses import LogitCheck, Reported, collecting, named, nonfinite_text, nothing_of, total
from karvan.train.optimizer_step import OptimizerStep
from karvan.train.precision import Precision
from karvan.train.types import Loss, Losses

if TYPE_CHECKING:
    from karvan.train.epoch import Accumulation, Epoch
    from karvan.train.feed import FedBatch
    from karvan.train.results import TrainingCounts


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


class StepPass:
    """One of a step's batches, the model's output for it, and its loss.

    batch: as the feed gave it. weight: 0 without samples. last: whether it completes the step. losses: as the
    loss function gave them; None for a batch without samples. loss: their sum. root: what the backward starts
    from. reported: by the model.
    """

    def __init__(self, step: StepBatches, index: int) -> None:
        self.step, self.index = step, index
        self.batch = step.group[index].batch
        self.weight = step.weights[index]
        self.last = index == len(step.group) - 1
        self.output: Any = None
        self.losses: Losses | None = None
        self.loss: Tensor | None = None
        self.root: Tensor | None = None
        self.reported = Reported()


@dataclass
class LossMeans:
    """The weighted mean of each loss over the passes of a step."""

    _sums: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 0.0

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
        see: Callable[[Any, Any], None] | None = None,
        divisor: float | None = None,
    ) -> LossMeans:
        """Compute the gradients of a step, batch by batch; its losses.

        see: gets the output of each batch that has samples, and the batch. metrics: the names that
        nothing may have which the model reports.
        """
        losses = LossMeans()
        for index in range(len(step.group)):
            one_pass = StepPass(step, index)  # none is referenced once the next one is taken
            self.placement.receive(one_pass.batch)
            self.forward(one_pass, one_pass.batch, loss)
            self.backward(one_pass, divisor)
            if one_pass.losses is not None:
                if see is not None:
                    see(one_pass.output, one_pass.batch)
                assert one_pass.loss is not None
                means = named(one_pass.losses, one_pass.loss) | one_pass.reported.entries(metrics)
                losses.add(means, one_pass.weight)
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


_log = logging.getLogger("karvan.train")

MOST = 10  # skipped steps from the very first one, without one that was taken
MOST_SCALED = 50  # with a scaled loss, whose scale is halved at each of them until it fits


_MOST = 4  # steps whose batches are held until their outcome is known


class _Step(NamedTuple):
    number: int
    taken: Tensor  # on the host, once `copied`
    copied: torch.cuda.Event
    batches: Sequence[Any]
    loss: Tensor | None


@dataclass
class StepOutcomes:
    """Counts the skipped steps of one fit, or of one TrainContext.

    scaled: precision fp16, where an occasional skipped step is normal. warns: whether this rank warns even
    if its own batch is fine. raises: whether a skipped step is an error.

    A fit that took no step has learned nothing. That is an error as soon as it is clear, and not a model that
    looks trained.

    The check of a step's gradients, and the update that it decides on, are queued on the GPU together. The
    answer is copied to page-locked memory, and the host looks for it after each of the next steps, without
    waiting. Only if a GPU is more than `_MOST` steps behind does the host wait, for the oldest of them: there
    is work enough in the queue meanwhile.
    """

    counts: TrainingCounts
    scaled: bool
    warns: bool
    raises: bool = False
    count: int = 0  # of skipped steps

    def __post_init__(self) -> None:
        self._taken = False
        self._nonfinite = ""  # what is wrong with the batch of the first skipped step
        self._waiting: deque[_Step] = deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []  # page-locked memory, and an event

    def add(
        self,
        number: int,
        applied: bool | Tensor | None,
        batches: Sequence[Any],
        loss: Tensor | None = None,
    ) -> None:
        """A step has been made or skipped; raises if this, or one before, was skipped and must not be."""
        if isinstance(applied, Tensor) and applied.is_cuda:
            with torch.cuda.device(applied.device):
                host_flag, copied = self._spare.pop() if self._spare else _copy_space(applied)
                host_flag.copy_(applied, non_blocking=True)
                copied.record()
            described = () if self.count else batches  # only the first warning says what is in them
            self._waiting.append(_Step(number, host_flag, copied, described, loss))
        elif applied:
            self._taken = True
        else:
            self._note(number, False, batches, loss)
        while self._waiting and (len(self._waiting) > _MOST or self._waiting[0].copied.query()):  # type: ignore[no-untyped-call]
            self._learn()

    def settle(self) -> None:
        """Wait for the outcomes of all steps."""
        while self._waiting:
            self._learn()

    def _learn(self) -> None:
        number, host_flag, copied, batches, loss = self._waiting.popleft()
        copied.synchronize()
        applied = bool(host_flag)
        self._spare.append((host_flag, copied))
        self._note(number, applied, batches, loss)

    def _note(self, number: int, applied: bool, batches: Sequence[Any], loss: Tensor | None) -> None:
        if applied:
            self._taken = True
            return
        self.counts.skipped += 1
        finite = loss is None or bool(torch.isfinite(loss.detach()))
        self.skip(number, batches, "a gradient" if finite else "the loss")

    def take(self) -> None:
        """A step was taken."""
        self._taken = True

    def skip(self, step: int, batches: Iterable[Any], what: str = "a gradient") -> None:
        """A step was skipped; raises if it is one too many for a fit that has not taken any."""
        if self.raises and not self.scaled:
            raise FloatingPointError(
                f"Step {step} was skipped: {what} is not finite.{nonfinite_text(batches)}"
            )
        self.count += 1
        if self.count == 1:
            self._nonfinite = nonfinite_text(batches)
            if not self.scaled and (self.warns or self._nonfinite):
                _log.warning("Step %d was skipped: %s is not finite.%s", step, what, self._nonfinite)
        if not self._taken and self.count >= (MOST_SCALED if self.scaled else MOST):
            raise self._error(f"The first {self.count} steps were all skipped")

    def end(self) -> None:
        """Training has ended; raises if all of its steps were skipped."""
        if self.count and not self._taken:
            raise self._error(f"All {self.count} steps were skipped")

    def _error(self, what: str) -> FloatingPointError:
        hint = self._nonfinite or (
            " No column of the first batch has any. Check the loss, the learning rates, and inputs that "
            "are very large."
        )
        return FloatingPointError(
            f"{what}, because a gradient was NaN or infinite, so nothing was learned.{hint}"
        )


def _copy_space(flag: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Page-locked memory for a copy, and an event for its end."""
    host_flag = torch.empty_like(flag, device="cpu", pin_memory=True)
    return host_flag, torch.cuda.Event()  # type: ignore[no-untyped-call]
