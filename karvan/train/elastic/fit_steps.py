"""`FitSteps`: what a fit of trainers that come and go needs of its steps, however they are made."""

from __future__ import annotations

from typing import Any, Protocol

from karvan.train.elastic.leased_work import LeasedWork


class FitSteps(Protocol):
    """How trainers of a group make steps: together (`GroupSteps`), or each on its own (`OwnSteps`)."""

    work: LeasedWork

    def agree(self, *, save: bool) -> dict[str, Any]:
        """Make a step or meet; a collective. save: this trainer says that a checkpoint is due."""

    def missed(self) -> dict[str, Any] | None:
        """What `agree` gave to trainers that are gone, and to no other."""

    def regrouped(self) -> None:
        """Another round has begun."""

    def settle(self) -> None:
        """It is settled what trainers that are gone have done; rank 0."""
