"""Reasons to stop before the goal: a signal or `trainer.stop`, on any rank.

A process that is alone stops when it is asked to. Several ranks stop together: a request travels with the
batches of the feed, or is asked for at moments that come rarely, such as the end of an evaluation.
"""

from __future__ import annotations

from karvan.distributed import Connection
from karvan.train.stopping.signals import note_termination
from karvan.train.stopping.stop_request import StopRequest


class Stopping:
    """What a Trainer's ranks have agreed on."""

    def __init__(self, connection: Connection, request: StopRequest) -> None:
        self._channel = connection.main
        self._alone = connection.world_size == 1
        self._request = request
        self._agreed: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the fit stops here, if it does: a rank that is not alone cannot do so by itself."""
        return self._request.reason if self._alone else self._agreed

    def asked(self) -> str | None:
        """Why it should, if this rank knows."""
        return self._agreed or self._request.reason

    def ask_all(self) -> None:
        """Stop if any rank should; a collective."""
        if not self._alone:
            told = self._channel.gather_json(self._request.reason)
            self.agree(next((each for each in told if each), None))

    def agree(self, reason: str | None) -> None:
        """All ranks stop, if there is a reason; the Trainer of each is told."""
        if reason is not None and self._agreed is None:
            self._agreed = reason
            if reason == "terminate":  # perhaps on another rank
                note_termination()
            self._request.stop(reason)
