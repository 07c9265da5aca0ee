"""A trainer's clients of embedding workers.

A worker that dies is replaced by an empty one. Calls without an answer go to that one; its answer says what
it needs, the engine or the ids of a batch, which are then sent. The ids come from their loader: `resend`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from typing_extensions import override

from karvan.clock import clock
from karvan.discovery.directory import find_role
from karvan.distributed.parameter_servers import ServiceClients
from karvan.errors import mark
from karvan.job.roles import Role
from karvan.protocol.embedding_worker import ABANDON_MEMBERS, ENGINE, MissingParts
from karvan.ragged import IdsReference
from karvan.wire import Array, Client, Message, Security
from karvan.wire.schema import A, Call

_FOUND_WITHIN = 5.0  # seconds of one attempt to find a worker; repeated until the call's deadline
# Separate channels, so that lookups do not wait for gradients, nor the other way round.
CHANNELS = ("claim", "backward")


class Workers(ServiceClients):
    """All workers; each has a thread for each channel, which makes its calls in order.

    resend: requests that the ids of a reference are sent to its worker again, and returns when they have
    arrived. release: called with references whose ids are not needed any more, by a finalizer, so it must not
    block.
    """

    def __init__(
        self,
        find: Sequence[Callable[[], str]],
        security: Security,
        hello: Mapping[str, Any],
        timeout: float,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(hello, security, timeout)
        self.resend: Callable[[IdsReference], None] | None = None
        self.release: Callable[[IdsReference], None] | None = None
        self._find = find
        self._leave = leave  # closes the directory
        self._gone: dict[int, deque[str]] = defaultdict(deque)  # names of ids that workers can release
        self._watched: weakref.WeakSet[IdsReference] = weakref.WeakSet()
        self._threads: dict[tuple[int, str], _CallThread] = {}

    def __len__(self) -> int:
        return len(self._find)

    def begin(
        self,
        worker: int,
        channel: str,
        call: Call[Any, MissingParts | A],
        head: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        *,
        engine: Mapping[str, Any],
        references: Sequence[IdsReference],
        first: Callable[[], None] = lambda: None,
        then: Callable[[Message[A] | Exception], None] = lambda answer: None,
    ) -> Future[Message[A]]:
        """Call a worker, after earlier calls; arrays must not change until the answer has arrived.

        engine: sent to the worker if it does not have it. references: of the batches that the call is about.
        first: called before, and then: with the answer or the exception, on the channel's thread.
        """
        if not 0 <= worker < len(self):
            raise ValueError(f"Expected a reference to one of {len(self)} embedding workers, got {worker}.")

        def work() -> Message[A]:
            first()
            peer = self.peer(worker, channel)
            return self._completed(peer, lambda: peer.call(call, head, arrays), engine, references)

        return self._thread(worker, channel).put(work, then)

    def watch(self, reference: IdsReference) -> None:
        """Have its worker release the ids, with one of the next calls, once nobody holds a reference."""
        if reference not in self._watched:
            self._watched.add(reference)
            equal = IdsReference(reference.worker, reference.name, reference.rows)
            weakref.finalize(reference, self._forget_ids, equal).atexit = False

    def _forget_ids(self, reference: IdsReference) -> None:
        self._gone[reference.worker].append(reference.name)
        if self.release is not None:
            self.release(reference)

    def take_gone(self, worker: int) -> list[str]:
        """Names of ids that a worker can release and has not been told yet."""
        waiting = self._gone[worker]
        return [waiting.popleft() for _ in range(len(waiting))]

    def abandon(self, members: Iterable[int]) -> None:
        """Members of an elastic run are gone: workers drop what they have of them, sooner or later."""
        head = {"members": sorted(members)}
        for worker in range(len(self)) if head["members"] else ():
            self.begin(worker, "claim", ABANDON_MEMBERS, head, engine={}, references=())

    def _thread(self, worker: int, channel: str) -> _CallThread:
        with self._lock:
            if (worker, channel) not in self._threads:
                self._threads[worker, channel] = _CallThread(f"karvan-{channel} {worker}")
            return self._threads[worker, channel]

    def close(self) -> None:
        """Disconnect from all of them; calls without an answer fail."""
        with self._lock:
            threads, self._threads = list(self._threads.values()), {}
        for thread in threads:
            thread.close()
        self._disconnect()
        self._leave()

    def _completed(
        self,
        peer: Client,
        call: Callable[[], Message[MissingParts | A]],
        engine: Mapping[str, Any],
        references: Sequence[IdsReference],
    ) -> Message[A]:
        """The answer to a call, which is made again until the worker misses nothing for it."""
        due = clock.now() + self._timeout
        while True:
            answer = call()
            needs = answer.head
            if not isinstance(needs, MissingParts):
                return Message(needs, answer.arrays)
            if needs.needs == "engine":
                peer.call(ENGINE, engine)
                continue
            text = f"{peer.name}: {needs.text}"
            missing = next((reference for reference in references if reference.name == needs.reference), None)
            if self.resend is None or missing is None:
                raise RuntimeError(text)
            if clock.now() > due:
                raise mark(RuntimeError(text), temporary=True)  # no record of the batch is to blame
            self.resend(missing)

    @override
    def _connect(self, number: int, channel: str) -> Client:
        return Client(
            f"embedding worker {number}",
            self._find[number],
            self._security,
            hello={**self.hello, "worker": number, "line": channel},
            deadline=self._timeout,
            forgetful=True,
        )


class _CallThread:
    """A thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(
        self, work: Callable[[], Message[A]], then: Callable[[Message[A] | Exception], None]
    ) -> Future[Message[A]]:
        """Run it after earlier calls."""
        result: Future[Message[A]] = Future()

        def run() -> None:
            try:
                answer = work()
            except Exception as error:
                then(error)
                result.set_exception(error)
            else:
                then(answer)
                result.set_result(answer)

        self._queue.put(run)
        return result

    def close(self) -> None:
        """End after earlier calls."""
        self._queue.put(None)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # releases its arrays while the thread waits


def find_workers(addresses: Sequence[str] | None, hello: Mapping[str, Any], timeout: float) -> Workers | None:
    """The workers at these addresses, or those that the environment names; None if there are none."""
    security = Security.from_environment()
    directory, count = find_role(Role.EMBEDDING_WORKER, addresses, security)
    if not count:
        return None
    find = [partial(directory.find, Role.EMBEDDING_WORKER, worker, _FOUND_WITHIN) for worker in range(count)]
    return Workers(find, security, hello, timeout, directory.close)
