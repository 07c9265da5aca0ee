"""The id features that an embedding worker holds, by the names that loaders gave them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from karvan.clock import clock
from karvan.ragged import Batch

_REMEMBERED = 4096  # names of expired batches, to explain why they are missing


@dataclass
class _Entry:
    ids: Batch
    arrived: float
    trainer: int | None = None  # who has claimed it

    @property
    def claimed(self) -> bool:
        return self.trainer is not None


class IdCache:
    """Batches by name. One that nobody claims within `expire` seconds is dropped; up to `most` may wait."""

    def __init__(self, expire: float, most: int) -> None:
        if not expire > 0 or most < 1:
            raise ValueError(
                f"Expected expire above 0 and room for 1 batch or more, got {expire} and {most}."
            )
        self.expire = expire
        self._most = most
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}  # the oldest first
        self._waiting = 0  # entries that were not claimed
        self._requested: set[str] = set()  # claimed before they arrived
        self._dropped: deque[str] = deque(maxlen=_REMEMBERED)
        self.expired = 0
        self.received = 0

    @property
    def waiting(self) -> int:
        """Batches that nobody has claimed."""
        with self._lock:
            self._drop_old()
            return self._waiting

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, name: str, ids: Batch) -> bool:
        """Store a batch, replacing one of that name; False if there is no room now."""
        with self._lock:
            self._drop_old()
            if name in self._entries:
                self._entries[name].ids = ids
                return True
            if self._waiting >= self._most and name not in self._requested:
                return False
            self._requested.discard(name)
            self._entries[name] = _Entry(ids, clock.now())
            self._waiting += 1
            self.received += 1
            return True

    def claim(self, name: str, trainer: int = 0) -> Batch | None:
        """The batch, which stays until `forget`; None if it is not here."""
        with self._lock:
            self._drop_old()
            entry = self._entries.get(name)
            if entry is None:
                self._requested.add(name)
                return None
            if not entry.claimed:
                self._waiting -= 1
            entry.trainer = trainer
            return entry.ids

    def why_missing(self, name: str) -> str:
        """The reason, for an error message."""
        with self._lock:
            if name in self._dropped:
                return f"nobody claimed it within {self.expire:g} s, so it was dropped"
        return "it never arrived, or was dropped"

    def forget(self, names: Iterable[str]) -> None:
        """Drop batches that nobody needs any more."""
        with self._lock:
            for name in names:
                self._requested.discard(name)
                entry = self._entries.pop(name, None)
                if entry is not None and not entry.claimed:
                    self._waiting -= 1

    def forget_claimed(self, trainer: int | None = None) -> None:
        """Drop the batches that a trainer has claimed, which is gone; None: those of all trainers."""
        with self._lock:
            self._entries = {
                name: entry
                for name, entry in self._entries.items()
                if not entry.claimed or (trainer is not None and entry.trainer != trainer)
            }
            if trainer is None:
                self._requested.clear()

    def _drop_old(self) -> None:
        before = clock.now() - self.expire
        old = []
        for name, entry in self._entries.items():
            if entry.arrived > before:
                break
            if not entry.claimed:
                old.append(name)
        for name in old:
            del self._entries[name]
        self._dropped.extend(old)
        self._waiting -= len(old)
        self.expired += len(old)
