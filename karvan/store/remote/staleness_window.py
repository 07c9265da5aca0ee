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
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from karvan.distributed.parameter_servers import Servers
from karvan.protocol.parameter_server import WITHDRAW
from karvan.store.program import LookupProgram
from karvan.store.types import LookupContext
from karvan.wire import Reply

# `PendingLookup`: a batch whose remote lookup may run ahead of its forward.


class PendingLookup(ABC):
    """A lookup's arguments and state; `ServerLookup` asks parameter servers, `WorkerLookup` a worker."""

    def __init__(self, program: LookupProgram, context: LookupContext) -> None:
        self.program = program
        self.context = context
        self.number = 0  # of a training lookup that has started
        self.started = False
        self.offered = False  # to the staleness window, which starts it when there is room

    def begin(self, number: int) -> None:
        """Send the request; training lookups are numbered from 1, others have no number (0)."""
        self.number = number
        self.started = True
        self._ask()

    def fits(self, context: LookupContext) -> bool:
        """Whether it is, or can be made, the lookup that a forward needs."""
        if not self.started and not self.offered:
            self.context = context
        return self.context.training == context.training and (
            self.context.step == context.step or not context.training
        )

    @abstractmethod
    def _ask(self) -> None:
        """Send the request, without waiting for the answer."""

    @abstractmethod
    def ready(self) -> tuple[bool, float]:
        """Whether the answer has still to come; if not, the time when it came."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the answer, and fill the outputs."""


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
    staged = []
    while waiting:
        staged.append(waiting.popleft())
    return staged


# `LookupsInFlight`: the training lookups of a remote store that have no applied gradient, and their states.
#
# A lookup is *ahead* from its request until a forward uses it, then *used* until its push. One that is
# dropped while it is ahead is withdrawn: servers undo it, because its batch was never trained. Any other
# lookup that nobody holds any more is *done*: servers, or the embedding worker that made it, may release its
# plan.


_USED = 2048  # lookups without a push that a capture names; more than a step has passes


class LookupsInFlight:
    """The lookups of one store, by number; the worker of a lookup is None if servers were asked directly."""

    def __init__(self, servers: Servers, store: int, staleness: int) -> None:
        self.window = StalenessWindow(staleness)
        self.sequence = 0  # of the last push
        self._servers = servers
        self._store = store
        self._ahead: set[int] = set()
        self._used: set[int] = set()
        self._withdrawn: deque[tuple[int | None, int]] = deque()
        self._done: dict[int | None, deque[int]] = defaultdict(deque)

    def add(self, number: int) -> None:
        """A training lookup is requested."""
        self._ahead.add(number)

    def use(self, number: int) -> None:
        """A forward uses a lookup: it counts in captures, whether it gets a push or not."""
        self._used.add(number)
        self._ahead.discard(number)
        # These are lookups of engines that get no gradients; servers know that they are done.
        if len(self._used) > 2 * _USED:
            self._used.difference_update(sorted(self._used)[:_USED])

    def push(self, numbers: Sequence[int]) -> int:
        """Gradients of these lookups are about to be sent; returns the number of the push."""
        self._used.difference_update(numbers)
        self.sequence += 1
        return self.sequence

    def drop(self, worker: int | None, number: int) -> None:
        """Nobody holds a lookup any more. Called when memory is freed, at any moment, so nothing is sent."""
        if number in self._ahead:
            self._ahead.discard(number)
            self._withdrawn.append((worker, number))
        else:
            self._done[worker].append(number)
        self.window.give_up(number)

    def take_done(self, worker: int | None) -> list[int]:
        """The lookups that can be released, which servers, or this worker, have not been told yet."""
        return pop_all(self._done[worker])

    def take_used(self) -> list[int]:
        """The lookups that were used and have had no push; a capture names them."""
        used = sorted(self._used)
        self._used.clear()
        return used

    def send_withdrawn(self) -> list[Reply[Any]]:
        """Withdraw the lookups that nobody will use any more."""
        withdrawn = pop_all(self._withdrawn)
        if not withdrawn:
            return []
        servers = range(len(self._servers))
        head = {"store": self._store, "batches": [number for _, number in withdrawn]}
        pending = Countdown(len(servers), partial(self._forget, withdrawn), self.window.fail)
        return [
            self._servers.peer(server).begin(WITHDRAW, head, then=lambda reply: pending.one(reply.error))
            for server in servers
        ]

    def _forget(self, withdrawn: list[tuple[int | None, int]]) -> None:
        # Only after servers have undone a lookup: they would count one that a worker has released as trained.
        for worker, number in withdrawn:
            if worker is not None:
                self._done[worker].append(number)

    def drain(self) -> None:
        """Wait until all gradients have been applied, in an elastic run those of all committed steps."""
        self.window.drain()
        self._servers.commits.flush()

    def settle(self) -> None:
        """The same, and lookups that were dropped have been undone."""
        for reply in self.send_withdrawn():
            reply.wait()
        self.drain()
