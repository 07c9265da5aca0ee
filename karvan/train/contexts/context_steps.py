"""The steps of a custom loop: a forward and a backward for each batch, the last of which applies the step.

Between a forward and its backward, the pass is remembered: its weight, and whether it is a step's last,
which DistributedDataParallel must know before the forward.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, closing
from typing import Any

import torch
from torch import Tensor

from karvan.exit_codes import note_training
from karvan.train.assembly import TrainingSetup
from karvan.train.feed.batch_source import FedBatch
from karvan.train.feed.epoch import Epoch
from karvan.train.reporting.results import TrainingCounts
from karvan.train.step.device_placement import make_placement
from karvan.train.step.step_outcomes import Skips, StepOutcomes
from karvan.train.step.step_routine import StepBatches, StepPass
from karvan.train.types import Losses, same, samples_of


class ContextSteps:
    """Makes the steps of a `TrainContext`'s batches, and counts them.

    raises: a step that is skipped raises a FloatingPointError, except for the overflows of fp16.
    """

    def __init__(self, setup: TrainingSetup, counts: TrainingCounts, raises: bool) -> None:
        runs = setup.runs
        self._setup = setup
        self._routine = setup.routine
        self._counts = counts
        self._moving = make_placement(runs.model, runs.device, same, [])
        self._skips = Skips(runs.precision.always_checks, runs.connection.rank == 0, raises)
        self._outcomes = StepOutcomes(self._skips, counts)
        self._turn: StepPass | None = None  # the batch that the loader gave, until its forward
        self._pass: StepPass | None = None  # the forward that waits for its backward
        self._step: StepBatches | None = None  # a step of which some batches, but not all, have been trained

    @property
    def in_step(self) -> bool:
        """Whether a step is in progress."""
        return self._pass is not None or self._step is not None

    def forget(self) -> None:
        """Drop the step that is in progress, if there is one."""
        self._turn = self._pass = self._step = None
        self._setup.update.forget()

    def end(self) -> None:
        """Training has ended; raises if all of its steps were skipped."""
        self.settle()
        if self._setup.passes.together:  # only then do all ranks come to the same result
            self._skips.end()

    def settle(self) -> None:
        """Wait until it is known, and counted, which steps were skipped."""
        self._outcomes.settle()

    def batches(self, epoch: Epoch, required: AbstractContextManager[None]) -> Generator[Any, None, None]:
        """The batches of an epoch, one after the other, each of which must be trained.

        required: the context in which the data is read.
        """
        trained = True
        try:
            with required, closing(epoch.groups()) as groups:
                for group in groups:
                    step = self._routine.begin(group, epoch)
                    trained = False
                    for index, fed in enumerate(group):
                        self._setup.runs.placement.receive(fed.batch)
                        self._turn = StepPass(step, index)
                        yield fed.batch
                    trained = step.done == len(group)
                    if step.done and not trained:
                        raise _incomplete(step)
            epoch.end_epoch()
        finally:
            self._turn = None
            if self._step is not None:
                self._step = None
                self._setup.update.forget()
            if not trained:
                epoch.move_back()

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """The output for a batch, and the batch on the model's device."""
        if self._pass is not None:
            raise RuntimeError(
                "forward was called twice: expected backward(loss) in between. For outputs without "
                "training, use ctx.eval()."
            )
        if not self._setup.runs.model.training:
            raise RuntimeError("forward trains, but the model is in eval mode: expected train mode.")
        made, batch = self._pass_of(batch)
        if not made.index:
            self._setup.dense.fresh()
        self._routine.forward(made, batch)
        self._pass, self._turn = made, None
        return made.output, batch

    def _pass_of(self, batch: Any) -> tuple[StepPass, Any]:
        if self._turn is not None and batch is self._turn.batch:
            return self._turn, batch
        moved = self._moving.place(batch)
        self._moving.receive(moved)
        samples = samples_of(moved)
        if self._turn is not None and samples == samples_of(self._turn.batch):
            return self._turn, moved
        gradient_accumulation_steps = self._setup.passes.gradient_accumulation_steps
        if gradient_accumulation_steps > 1:
            raise RuntimeError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} needs batches of ctx.loader, "
                "which counts them for each step, got another batch."
            )
        channel = self._setup.runs.connection.main
        every = samples if channel.world_size == 1 else int(channel.sum(torch.tensor([samples]))[0])
        return StepPass(self._routine.begin([FedBatch(moved, None, samples, every)]), 0), moved

    def backward(self, losses: Losses) -> bool | Tensor:
        """Go backward from the loss of the last forward; whether a step was made by it."""
        made = self._pass
        if made is None:
            raise RuntimeError(
                "backward was called without a forward: expected output, labels = ctx.forward(batch) before."
            )
        loss = self._routine.add_loss(made, losses)
        if not loss.requires_grad:
            raise ValueError(
                "The loss depends on nothing that is trained: expected a loss computed from the output "
                "of forward, without detach, item or torch.no_grad."
            )
        self._pass = None
        step = made.step
        self._routine.backward(made)
        if not made.last:
            self._step = step
            return False
        if step.done < len(step.group):
            raise _incomplete(step)
        self._step = None
        taken = self._routine.apply(step)
        self._count(step)
        self._outcomes.add(self._counts.step, taken, [fed.batch for fed in step.group], loss.detach())
        return taken if isinstance(taken, Tensor) else bool(taken)

    def _count(self, step: StepBatches) -> None:
        if step.epoch is not None:
            step.epoch.trained(step.group, step.epoch.samples(step.group))
        else:
            note_training()
            self._counts.step += 1
            self._counts.samples += sum(fed.all_samples for fed in step.group)


def _incomplete(step: StepBatches) -> RuntimeError:
    return RuntimeError(
        f"Of a step's {len(step.group)} batches {step.done} were trained: expected forward and backward for "
        "each of them."
    )
