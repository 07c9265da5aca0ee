"""Which steps were taken and which skipped; on a GPU the host learns it some steps later.

The check of a step's gradients, and the update that it decides on, are queued on the GPU together. The answer
is copied to page-locked memory, and the host looks for it after each of the next steps, without waiting. Only
if a GPU is more than `_MOST` steps behind does the host wait, for the oldest of them: there is work enough in
the queue meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from karvan.ragged import NestedRagged, Padded, Ragged

if TYPE_CHECKING:
    from karvan.train.results import TrainingCounts


# Steps that are skipped because a gradient is not finite: which columns may be why, when it is an error.
#
# A fit that took no step has learned nothing. That is an error as soon as it is clear, and not a model that
# looks trained.


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


class StepOutcomes:
    """Counts the skipped steps of one fit, or of one TrainContext.

    scaled: precision fp16, where an occasional skipped step is normal. warns: whether this rank warns even
    if its own batch is fine. raises: whether a skipped step is an error.
    """

    def __init__(self, counts: TrainingCounts, scaled: bool, warns: bool, raises: bool = False) -> None:
        self._counts = counts
        self._raises = raises and not scaled
        self._scaled = scaled
        self._warns = warns
        self._taken = False
        self._found = ""  # what is wrong with the batch of the first skipped step
        self.count = 0
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
        else:
            self._note(number, bool(applied), batches, loss)
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
            self.take()
            return
        self._counts.skipped += 1
        finite = loss is None or bool(torch.isfinite(loss.detach()))
        self.skip(number, batches, "a gradient" if finite else "the loss")

    def take(self) -> None:
        """A step was taken."""
        self._taken = True

    def skip(self, step: int, batches: Iterable[Any], what: str = "a gradient") -> None:
        """A step was skipped; raises if it is one too many for a fit that has not taken any."""
        if self._raises:
            raise FloatingPointError(
                f"Step {step} was skipped: {what} is not finite.{nonfinite_text(batches)}"
            )
        self.count += 1
        if self.count == 1:
            self._found = nonfinite_text(batches)
            if not self._scaled and (self._warns or self._found):
                _log.warning("Step %d was skipped: %s is not finite.%s", step, what, self._found)
        if not self._taken and self.count >= (MOST_SCALED if self._scaled else MOST):
            raise self._error(f"The first {self.count} steps were all skipped")

    def end(self) -> None:
        """Training has ended; raises if all of its steps were skipped."""
        if self.count and not self._taken:
            raise self._error(f"All {self.count} steps were skipped")

    def _error(self, what: str) -> FloatingPointError:
        hint = self._found or (
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


def nonfinite_text(batches: Iterable[Any]) -> str:
    """Which columns of these batches have NaN or infinite values, as sentences; nothing if none has."""
    problems: dict[str, str] = {}
    for batch in batches:
        for name, entry in batch.items() if isinstance(batch, Mapping) else ():
            if name not in problems and (text := _column_text(name, entry)):
                problems[name] = text
    if not problems:
        return ""
    return (
        f" {' '.join(problems.values())} Fill missing values (kv.Feature(…).fill_missing(0)), or leave such "
        "samples out."
    )


def _column_text(name: str, entry: Any) -> str:
    values = entry.values if isinstance(entry, Ragged | NestedRagged | Padded) else entry
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        return ""
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    if not (nans or infinities):
        return ""
    kinds = [text for count, text in ((nans, "NaN"), (infinities, "infinity")) if count]
    if values is entry:
        wrong = (~torch.isfinite(values)).reshape(len(values), -1).any(1)
        return f"Column '{name}' has {' and '.join(kinds)} in {int(wrong.sum())} of {len(wrong)} samples."
    return f"Column '{name}' has {' and '.join(kinds)} in {nans + infinities} of {values.numel()} values."
