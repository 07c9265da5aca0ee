"""Which steps were taken and which skipped; on a GPU the host learns it some steps later.

The check of a step's gradients, and the update that it decides on, are queued on the GPU together. The answer
is copied to page-locked memory, and the host looks for it after each of the next steps, without waiting. Only
if a GPU is more than `_MOST` steps behind does the host wait, for the oldest of them: there is work enough in
the queue meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from karvan.train.step.nonfinite import Skips

if TYPE_CHECKING:
    from karvan.train.reporting.results import TrainingCounts

_MOST = 4  # steps whose batches are held until their outcome is known


class _Step(NamedTuple):
    number: int
    taken: Tensor  # on the host, once `copied`
    copied: torch.cuda.Event
    batches: Sequence[Any]
    loss: Tensor | None


class StepOutcomes:
    """Counts the skipped steps of one fit, or of one TrainContext, and reports them to its `Skips`."""

    def __init__(self, skips: Skips, counts: TrainingCounts) -> None:
        self._skips = skips
        self._counts = counts
        self._waiting: deque[_Step] = deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []  # page-locked memory, and an event

    def add(
        self,
        number: int,
        taken: bool | Tensor | None,
        batches: Sequence[Any],
        loss: Tensor | None = None,
    ) -> None:
        """A step has been made or skipped; raises if this, or one before, was skipped and must not be."""
        if isinstance(taken, Tensor) and taken.is_cuda:
            with torch.cuda.device(taken.device):
                here, copied = self._spare.pop() if self._spare else _copy_space(taken)
                here.copy_(taken, non_blocking=True)
                copied.record()
            held = () if self._skips.count else batches  # only the first warning says what is in them
            self._waiting.append(_Step(number, here, copied, held, loss))
        else:
            self._note(number, bool(taken), batches, loss)
        while self._waiting and (len(self._waiting) > _MOST or self._waiting[0].copied.query()):  # type: ignore[no-untyped-call]
            self._learn()

    def settle(self) -> None:
        """Wait for the outcomes of all steps."""
        while self._waiting:
            self._learn()

    def _learn(self) -> None:
        number, here, copied, batches, loss = self._waiting.popleft()
        copied.synchronize()
        taken = bool(here)
        self._spare.append((here, copied))
        self._note(number, taken, batches, loss)

    def _note(self, number: int, taken: bool, batches: Sequence[Any], loss: Tensor | None) -> None:
        if taken:
            self._skips.take()
            return
        self._counts.skipped += 1
        finite = loss is None or bool(torch.isfinite(loss.detach()))
        self._skips.skip(number, batches, "a gradient" if finite else "the loss")


def _copy_space(taken: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Page-locked memory for a copy, and an event for its end."""
    here = torch.empty_like(taken, device="cpu", pin_memory=True)
    return here, torch.cuda.Event()  # type: ignore[no-untyped-call]
