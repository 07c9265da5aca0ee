"""`RefusalLog`: counts refused callers without a log line for each attempt.

The first refusal of a host is logged at once, further ones for the same reason once a minute with their
number: an attacker who tries a thousand tokens is visible, and cannot fill a disk. Tokens are never logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import NamedTuple

_log = logging.getLogger("karvan.wire")

EVERY = 60.0  # seconds between two lines about the same host and reason
_MOST_HOSTS = 1000  # with log lines of their own; further ones share a line
_MOST_REASONS = 20  # of a host, likewise


class _Key(NamedTuple):
    host: str
    reason: str


class _Count:
    def __init__(self, now: float) -> None:
        self.since = now
        self.more = 0


class RefusalLog:
    """The refusals of one service; any thread may report."""

    def __init__(self, service: str, every: float = EVERY) -> None:
        self._service = service
        self._every = every
        self._lock = threading.Lock()
        self._counts: dict[_Key, _Count] = {}
        self._reasons: Counter[str] = Counter()  # of a host

    def add(self, host: str, reason: str, address: str = "") -> None:
        """Report a refusal; address: the exact address, for the first line."""
        with self._lock:
            key = _Key(host, reason)
            if key not in self._counts:
                if host not in self._reasons and len(self._reasons) >= _MOST_HOSTS:
                    key = _Key("other hosts", "various reasons")
                elif self._reasons[host] >= _MOST_REASONS:
                    key = _Key(host, "various reasons")
            if key in self._counts:
                self._counts[key].more += 1
                return
            self._counts[key] = _Count(time.monotonic())
            self._reasons[key.host] += 1
        _log.warning("%s refused %s: %s", self._service, address or host, reason)

    def flush(self, *, all_counts: bool = False) -> None:
        """Log what has been counted for long enough; called periodically."""
        now = time.monotonic()
        due = []
        with self._lock:
            for key, count in list(self._counts.items()):
                if now - count.since < self._every and not all_counts:
                    continue
                if count.more:
                    due.append((key, count.more, now - count.since))
                    self._counts[key] = _Count(now)
                else:  # no refusal for that long: the next one counts as the first
                    del self._counts[key]
                    self._reasons[key.host] -= 1
                    if not self._reasons[key.host]:
                        del self._reasons[key.host]
        for key, more, seconds in due:
            _log.warning(
                "%s refused %s %d more times in %.0f s: %s",
                self._service,
                key.host,
                more,
                seconds,
                key.reason,
            )
