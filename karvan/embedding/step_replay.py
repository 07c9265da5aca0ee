"""Steps that are computed again with the vectors of the first time.

Nothing is looked up or counted twice; gradients of the second time are those of the same lookup.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import Tensor

from karvan.embedding.feature_inputs import Inputs
from karvan.store import LookupPlan


class ReplayableForward(NamedTuple):
    """A training forward."""

    inputs: Inputs
    plan: LookupPlan
    outs: tuple[Tensor, ...]


class StepReplay:
    """What an engine keeps of the training forwards of a step, if somebody wants it to."""

    def __init__(self) -> None:
        self._recording = False
        self._kept: list[ReplayableForward] = []
        self._left: deque[ReplayableForward] = deque()

    def record(self) -> None:
        """A step begins that may be computed again."""
        self._recording = True
        self._kept.clear()
        self._left.clear()

    def replay(self) -> None:
        """It is computed again: the same forwards, in the same order."""
        self._left = deque(self._kept)

    def end(self) -> None:
        """It has been made."""
        self.record()
        self._recording = False

    def keep(self, inputs: Inputs, plan: LookupPlan, outs: tuple[Tensor, ...]) -> None:
        """A training forward gives these outputs; a model may write to them, so copies are kept."""
        if self._recording:
            self._kept.append(ReplayableForward(inputs, plan, tuple(out.clone() for out in outs)))

    def next(self) -> ReplayableForward | None:
        """What the next training forward gives, if it is one of those that were kept."""
        if not self._left:
            return None
        kept = self._left.popleft()
        return kept._replace(outs=tuple(out.clone() for out in kept.outs))
