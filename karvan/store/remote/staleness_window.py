"""Bounds how far lookups run ahead: the batches between a lookup and its acknowledged gradient.

A lookup in advance waits in a queue until there is room. A forward that needs a lookup now waits only for
gradients that are in flight: those that have not been sent may depend on it.

Old vectors make worse gradients, so lookups run no further ahead than they need to: one batch further
whenever one was not ready in time, one batch less when, for some time, they have been ready for more than a
full step before their use.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from karvan.store.remote.pending_lookup import PendingLookup

T = TypeVar("T")

_EARLY = 8  # steps in a row with lookups that were ready too early, until they run less far ahead


class StalenessWindow:
    """At most `bound` batches of this trainer are between lookup and acknowledged gradient."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._lead = min(2, bound)  # how many may be in flight now
        self._early = 0
        self._changed = threading.Condition()
        self._queue: deque[weakref.ref[PendingLookup]] = deque()
        self._out: set[int] = set()  # lookups without an acknowledged gradient
        self._sent: set[int] = set()  # those of them whose gradient is in flight
        self._gone: deque[int] = deque()  # lookups that nobody holds any more
        self._number = 0
        self._failure: Exception | None = None
        self.most = 0  # largest number of batches without an acknowledged gradient at any time
        self.total = 0  # sum of that number over lookups, for the mean

    @property
    def lookups(self) -> int:
        """How many lookups have started so far."""
        return self._number

    def offer(self, lookup: PendingLookup) -> None:
        """Start it as soon as there is room, after those that were offered before."""
        with self._changed:
            self._queue.append(weakref.ref(lookup))
            self._collect()
            self._advance()

    def need(self, lookup: PendingLookup) -> None:
        """Start it unless it has started, once the gradients in flight leave room."""
        with self._changed:
            while not lookup.started:
                self.check()
                self._collect()
                if len(self._out) < self._bound or not self._sent:
                    self._begin(lookup)
                else:
                    self._changed.wait()

    def used(self, waited: bool, spare: float) -> None:
        """A lookup was used: whether its use had to wait, and for how many steps it had been ready."""
        with self._changed:
            if waited:
                self._lead, self._early = min(self._bound, self._lead + 1), 0
                self._advance()
            else:
                self._early = self._early + 1 if spare > 1.25 else 0
            if self._early == _EARLY:
                self._lead, self._early = max(min(2, self._bound), self._lead - 1), 0

    def sent(self, numbers: Iterable[int]) -> None:
        """The gradients of these lookups are in flight."""
        with self._changed:
            self._sent.update(self._out.intersection(numbers))

    def end(self, numbers: Iterable[int]) -> None:
        """The gradients of these lookups have been applied."""
        with self._changed:
            self._collect()
            self._out.difference_update(numbers)
            self._sent.difference_update(numbers)
            self._advance()
            self._changed.notify_all()

    def give_up(self, number: int) -> None:
        """Nobody holds this lookup any more: if its gradient is not in flight, none will come.

        Called when memory is freed, at any moment, so the number is only noted here.
        """
        self._gone.append(number)

    def fail(self, error: Exception) -> None:
        """No answers will come any more; whoever waits, or asks next, gets the error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the exception of a failure in the background, if there was one."""
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Wait until no gradient is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: not self._sent or self._failure is not None)
            self.check()

    def _collect(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            if number not in self._sent:
                self._out.discard(number)

    def _advance(self) -> None:
        while self._queue and len(self._out) < self._lead and self._failure is None:
            lookup = self._queue.popleft()()
            if lookup is not None and not lookup.started:
                self._begin(lookup)

    def _begin(self, lookup: PendingLookup) -> None:
        self._number += 1
        lookup.begin(self._number)
        self._out.add(self._number)
        self.most = max(self.most, len(self._out))
        self.total += len(self._out)


class Countdown:
    """Calls `done` once all of some calls have been answered, without a thread that waits."""

    def __init__(self, calls: int, done: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        self._left = calls
        self._done: Callable[[], None] | None = done
        self._fail = fail
        self._lock = threading.Lock()

    def one(self, error: Exception | None) -> None:
        """One has been answered, with or without an error."""
        if error is not None:
            self._fail(error)
            return
        with self._lock:
            self._left -= 1
            if self._left:
                return
            done, self._done = self._done, None  # releases what it holds
        assert done is not None
        done()


def pop_all(waiting: deque[T]) -> list[T]:
    """Remove and return all items; other threads may add more meanwhile."""
    found = []
    while waiting:
        found.append(waiting.popleft())
    return found
