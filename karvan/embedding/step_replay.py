"""`StepReplay`: computes a step again with the vectors of its first computation.

Nothing is looked up or counted twice; gradients of the second computation belong to the same lookup.
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
    """The training forwards of an engine's step, recorded if the step may have to be computed again."""

    def __init__(self) -> None:
        self._recording = False
        self._forwards: list[ReplayableForward] = []
        self._remaining: deque[ReplayableForward] = deque()

    def record(self) -> None:
        """A step starts that may be computed again."""
        self._recording = True
        self._forwards.clear()
        self._remaining.clear()

    def replay(self) -> None:
        """The step is computed again: the same forwards, in the same order."""
        self._remaining = deque(self._forwards)

    def end(self) -> None:
        """The step is complete."""
        self.record()
        self._recording = False

    def add(self, inputs: Inputs, plan: LookupPlan, outs: tuple[Tensor, ...]) -> None:
        """A training forward returns these outputs; a model may write to them, so copies are recorded."""
        if self._recording:
            self._forwards.append(ReplayableForward(inputs, plan, tuple(out.clone() for out in outs)))

    def next(self) -> ReplayableForward | None:
        """The result of the next training forward, if it is one of those that were recorded."""
        if not self._remaining:
            return None
        forward = self._remaining.popleft()
        return forward._replace(outs=tuple(out.clone() for out in forward.outs))
