"""`LookupsInFlight`: the training lookups of a remote store that have no applied gradient, and their states.

A lookup is *ahead* from its request until a forward uses it, then *used* until its push. One that is dropped
while it is ahead is withdrawn: servers undo it, because its batch was never trained. Any other lookup that
nobody holds any more is *done*: servers, or the embedding worker that made it, may release its plan.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

from karvan.distributed.clients.parameter_servers import Servers
from karvan.store.remote.staleness_window import Countdown, StalenessWindow, pop_all
from karvan.wire import Reply

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

    def send_withdrawn(self) -> list[Reply]:
        """Withdraw the lookups that nobody will use any more."""
        withdrawn = pop_all(self._withdrawn)
        if not withdrawn:
            return []
        servers = range(len(self._servers))
        head = {"store": self._store, "batches": [number for _, number in withdrawn]}
        pending = Countdown(len(servers), partial(self._forget, withdrawn), self.window.fail)
        return [
            self._servers.peer(server).begin("withdraw", head, then=lambda reply: pending.one(reply.error))
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
