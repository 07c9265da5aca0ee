"""Data that a run has trained to its end: a late retry of yesterday's job must not train it twice.

A checkpoint has a list of them, the newest 1,000. A fit on one of them is the same as one on the data of the
newest checkpoint: nothing to do, unless more epochs or steps are requested than were trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from karvan.data.identity import Identity

_MOST = 1000


@dataclass(frozen=True)
class FinishedData:
    """How much of some data was trained, and the step at which that ended.

    early: `EarlyStopping` has ended it, so that there is nothing to do for any goal.
    """

    id: str
    label: str
    step: int
    epochs: int
    steps: int
    early: bool = False

    def state(self) -> dict[str, Any]:
        """The values, for JSON."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> FinishedData:
        """Restore what `state` gave."""
        return cls(**state)

    @property
    def amount(self) -> str:
        """How much was trained, as text."""
        if self.early or not self.epochs:
            return f"{self.steps} steps"
        return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"


def with_newest(history: Iterable[FinishedData], newest: FinishedData) -> tuple[FinishedData, ...]:
    """The history with one more at its end, in place of an older one of the same data."""
    return (*(each for each in history if each.id != newest.id), newest)[-_MOST:]


def find(history: Iterable[FinishedData], identity: Identity | None) -> FinishedData | None:
    """How some data was trained before, if it was."""
    if identity is None or identity.grows:
        return None
    return next((each for each in history if each.id == identity.id), None)
