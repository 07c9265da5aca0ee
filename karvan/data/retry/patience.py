"""`Patience`: how long readers wait for an outage to end, with which pauses, and what is logged.

The first failure is logged as a warning at once, then one warning follows every half minute, however many
threads are affected, and one when the outage is over. Pauses double from a tenth of a second up to five
seconds.
"""

from __future__ import annotations

import logging
import math
import threading
import time

from karvan.activity import activity

_log = logging.getLogger("karvan.data")

RETRY_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_WARN_EVERY = 30.0


def check_retry_seconds(seconds: float) -> float:
    """The same number; a ValueError unless it is 0 or more, and finite."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"retry_seconds must be a number of seconds, got {seconds!r}.")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"retry_seconds must be 0 or more, got {seconds}.")
    return float(seconds)


class Patience:
    """The outages of one source. Threads may share it; each counts its own time from its first failure."""

    def __init__(self, seconds: float = RETRY_SECONDS) -> None:
        self.seconds = check_retry_seconds(seconds)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._since: float | None = None  # when the current outage started
        self._warned = -math.inf

    def end(self) -> None:
        """The data is no longer needed: threads that wait give up."""
        self._ended.set()

    def wait(self, error: BaseException, attempt: int, since: float) -> bool:
        """Wait before the next attempt; False if time is up.

        attempt: counted from 0. since: the time of the first failure.
        """
        now = time.monotonic()
        left = since + self.seconds - now
        if left <= 0 or self._ended.is_set():
            return False
        self._warn(error, now)
        activity.advance()  # waiting is not a stall, since it is limited
        pause = min(_FIRST_PAUSE * 2.0 ** min(attempt, 20), _LONGEST_PAUSE, left)
        return not self._ended.wait(pause)

    def succeeded(self) -> None:
        """Something was read after a failure."""
        with self._lock:
            since, self._since = self._since, None
            was_reported = since is not None and self._warned >= since
        if since is not None and was_reported:
            _log.warning("Data can be read again, after %.0f seconds.", time.monotonic() - since)

    def _warn(self, error: BaseException, now: float) -> None:
        with self._lock:
            if self._since is None:
                self._since = now
            if now < self._warned + _WARN_EVERY:
                return  # also for a source that fails again and again
            self._warned = now
        _log.warning("%s Retrying for up to %g seconds.", _sentence(error), self.seconds)


def _sentence(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if text.endswith(".") else f"{text}."
