"""`FittedOp`: a step that learns from data, unless its values are given."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from karvan.features.ops.base import Op
from karvan.features.running_moments import RunningStatistics


class FittedOp(Op):
    """A step with numbers or words of its own, which are given or found by `FeatureEngine.fit`."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it has them."""

    @abstractmethod
    def statistics(self) -> RunningStatistics:
        """What counts the data that it needs; empty."""

    @abstractmethod
    def fitted(self, found: RunningStatistics) -> Self:
        """The same step with what was found; a ValueError if that is not enough."""

    @abstractmethod
    def fit_state(self) -> Any:
        """What was found, as a tree with tensors; None before."""

    @abstractmethod
    def with_state(self, state: Any) -> Self:
        """The same step with what `fit_state` gave; a ValueError if it is that of another kind of step."""
