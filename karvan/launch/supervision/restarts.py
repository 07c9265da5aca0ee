"""How often and when processes are restarted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from karvan.clock import clock
from karvan.outages import retry_delay

_LONGEST_DELAY = 30.0


class RestartBudget:
    """Up to `most` restarts within `window` seconds, each after a longer delay than the one before."""

    def __init__(self, most: int, window: float, backoff: float) -> None:
        self._most = most
        self._window = window
        self._backoff = backoff
        self._restarts: deque[float] = deque()

    def take(self) -> bool:
        """Count one more restart; whether it is allowed."""
        now = clock.now()
        while self._restarts and self._restarts[0] < now - self._window:
            self._restarts.popleft()
        if len(self._restarts) >= self._most:
            return False
        self._restarts.append(now)
        return True

    def due(self) -> float:
        """When the restart is due; delays are random, so that not all restart at once."""
        return clock.now() + retry_delay(self._backoff, max(0, len(self._restarts) - 1), _LONGEST_DELAY)

    def times(self) -> list[float]:
        """When restarts were counted, by the wall clock in whole seconds, for the next master."""
        return [round(time.time() - (clock.now() - each)) for each in self._restarts]

    def restore(self, times: Iterable[float]) -> None:
        """Count the restarts of the last master."""
        self._restarts = deque(clock.now() - max(0.0, time.time() - each) for each in times)

    def __str__(self) -> str:
        return f"{self._most} restarts within {self._window:g} seconds"
