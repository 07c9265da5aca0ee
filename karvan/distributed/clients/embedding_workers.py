"""A trainer's clients of embedding workers.

A worker that dies is replaced by an empty one. Calls without an answer go to that one; its answer says what
it needs, the engine or the ids of a batch, which are then sent. The ids come from their loader: `resend`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from karvan.clock import clock
from karvan.discovery.directory import find_role
from karvan.job.roles import Role
from karvan.protocol.embedding_worker import WORKER_CALLS
from karvan.wire import Array, Client, Message, Security

if TYPE_CHECKING:
    from karvan.ragged import IdsReference

Then: TypeAlias = Callable[[Message | Exception], None]

_FOUND_WITHIN = 5.0  # seconds of one attempt to find a worker; repeated until the call's deadline
# Separate channels, so that lookups do not wait for gradients, nor the other way round.
CHANNELS = ("claim", "backward")


class Workers:
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
        self.resend: Callable[[IdsReference], None] | None = None
        self.release: Callable[[IdsReference], None] | None = None
        self._find = find
        self._security = security
        self._hello = hello
        self._timeout = timeout
        self._leave = leave  # closes the directory
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, str], Client] = {}
        self._threads: dict[tuple[int, str], _CallThread] = {}

    def __len__(self) -> int:
        return len(self._find)

    def begin(
        self,
        worker: int,
        channel: str,
        method: str,
        head: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        *,
        engine: Mapping[str, Any],
        references: Sequence[IdsReference],
        then: Then = lambda answer: None,
    ) -> Future[Message]:
        """Call a worker, after earlier calls; arrays must not change until the answer has arrived.

        engine: sent to the worker if it does not have it. references: of the batches that the call is about.
        then: called with the answer, or with the exception, on the channel's thread.
        """
        if not 0 <= worker < len(self):
            raise ValueError(f"Expected a reference to one of {len(self)} embedding workers, got {worker}.")
        work = partial(self._call, worker, channel, method, head, arrays, engine, references)
        with self._lock:
            if (worker, channel) not in self._threads:
                self._threads[worker, channel] = _CallThread(f"karvan-{channel} {worker}")
            return self._threads[worker, channel].put(work, then)

    def bytes(self) -> tuple[int, int]:
        """Bytes of arrays sent and received so far."""
        peers = list(self._peers.values())
        return sum(peer.bytes_sent for peer in peers), sum(peer.bytes_received for peer in peers)

    def close(self) -> None:
        """Disconnect from all of them; calls without an answer fail."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            threads, self._threads = list(self._threads.values()), {}
        for thread in threads:
            thread.close()
        for peer in peers:
            peer.close()
        self._leave()

    def _call(
        self,
        worker: int,
        channel: str,
        method: str,
        head: Mapping[str, Any],
        arrays: Sequence[Array],
        engine: Mapping[str, Any],
        references: Sequence[IdsReference],
    ) -> Message:
        peer = self._peer(worker, channel)
        due = clock.now() + self._timeout
        while True:
            answer = peer.call(method, head, arrays)
            needs, text = answer.head.get("needs"), f"{peer.name}: {answer.head.get('text')}"
            if needs is None:
                return answer
            if needs == "engine":
                peer.call("engine", engine)
                continue
            missing = next((each for each in references if each.name == answer.head.get("reference")), None)
            if self.resend is None or missing is None or clock.now() > due:
                raise RuntimeError(text)
            self.resend(missing)

    def _peer(self, worker: int, channel: str) -> Client:
        with self._lock:
            if (worker, channel) not in self._peers:
                self._peers[worker, channel] = Client(
                    f"embedding worker {worker}",
                    self._find[worker],
                    self._security,
                    hello={**self._hello, "worker": worker, "line": channel},
                    deadline=self._timeout,
                    forgetful=True,
                    calls=WORKER_CALLS,
                )
            return self._peers[worker, channel]


class _CallThread:
    """A thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], Message], then: Then) -> Future[Message]:
        """Run it after earlier calls."""
        job = _Job(work, then)
        self._queue.put(job)
        return job.result

    def close(self) -> None:
        """End after earlier calls."""
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.do()
            del job  # releases its arrays while the thread waits


class _Job:
    def __init__(self, work: Callable[[], Message], then: Then) -> None:
        self.result: Future[Message] = Future()
        self._work = work
        self._then = then

    def do(self) -> None:
        try:
            answer = self._work()
        except Exception as error:
            self._then(error)
            self.result.set_exception(error)
        else:
            self._then(answer)
            self.result.set_result(answer)


def find_workers(addresses: Sequence[str] | None, hello: Mapping[str, Any], timeout: float) -> Workers | None:
    """The workers at these addresses, or those that the environment names; None if there are none."""
    security = Security.from_environment()
    directory, count = find_role(Role.EMBEDDING_WORKER, addresses, security)
    if not count:
        return None
    find = [partial(directory.find, Role.EMBEDDING_WORKER, worker, _FOUND_WITHIN) for worker in range(count)]
    return Workers(find, security, hello, timeout, directory.close)
