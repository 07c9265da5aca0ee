"""Reasons to stop before the goal: a signal or `trainer.stop`, on any rank.

A single process stops when it is requested. Several ranks stop together: a request travels with the batches
of the feed, or is gathered at rare moments, such as the end of an evaluation. Of trainers that come and go it
travels with their steps alone.
"""

from __future__ import annotations

from karvan.distributed import Connection
from karvan.train.stopping.signals import note_termination
from karvan.train.stopping.stop_request import StopRequest


class Stopping:
    """The decision of a Trainer's ranks to stop."""

    def __init__(self, connection: Connection, request: StopRequest) -> None:
        self._channel = connection.main
        self._alone = connection.world_size == 1 and connection.group is None
        self._gathers = connection.world_size > 1
        self._request = request
        self._agreed: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the fit stops here, if it does: a rank that is not alone cannot do so by itself."""
        return self._request.reason if self._alone else self._agreed

    def asked(self) -> str | None:
        """Why the fit should stop, if this rank knows a reason."""
        return self._agreed or self._request.reason

    def ask_all(self) -> None:
        """Stop if any rank should; a collective."""
        if self._gathers:
            reasons = self._channel.gather_json(self._request.reason)
            self.agree(next((each for each in reasons if each), None))

    def agree(self, reason: str | None) -> None:
        """Stop on all ranks, if there is a reason."""
        if reason is not None and self._agreed is None:
            self._agreed = reason
            if reason == "terminate":  # perhaps on another rank
                note_termination()
            self._request.stop(reason)
