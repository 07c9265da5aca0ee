"""`FittedOp`: a step that learns from data, unless its values are passed as arguments."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from karvan.features.ops.base import Op
from karvan.features.running_moments import RunningStatistics


class FittedOp(Op):
    """A step with numbers or words, which are arguments or computed by `FeatureEngine.fit`."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it has its numbers or words."""

    @abstractmethod
    def statistics(self) -> RunningStatistics:
        """Empty statistics of the kind that it needs."""

    @abstractmethod
    def fitted(self, found: RunningStatistics) -> Self:
        """The same step with the statistics that were found; a ValueError if there is too little data."""

    @abstractmethod
    def fit_state(self) -> Any:
        """The fitted values, as a tree with tensors; None before the fit."""

    @abstractmethod
    def with_state(self, state: Any) -> Self:
        """The same step with the values of a `fit_state`; a ValueError if it is from another kind of step."""
