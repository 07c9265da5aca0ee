"""`StopRequest`: why the fit of this process should stop, by a signal or by `Trainer.stop`."""

from __future__ import annotations

from karvan.train.stopping.signals import Signals


class StopRequest:
    """A request to stop a fit.

    `final`: the data is trained enough, so the next fit may use other data.
    """

    def __init__(self) -> None:
        self.signals = Signals()
        self.final = False
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the fit should stop, if it should: "interrupt", "terminate", or the reason passed to `stop`."""
        return self.signals.received or self._reason

    def begin(self) -> None:
        """A fit starts: drop the requests of the fit before."""
        self._reason, self.final = None, False

    def stop(self, reason: str, *, final: bool = False) -> None:
        """Stop after the current step."""
        if not reason:
            raise ValueError("stop expects a reason, got an empty one.")
        self._reason = reason
        self.final = self.final or final
