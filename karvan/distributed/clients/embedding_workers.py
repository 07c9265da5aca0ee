"""A trainer's clients of embedding workers.

A worker that dies is replaced by one that knows nothing. Calls without an answer go to that one; it says what
it needs, the engine or the ids of a batch, and is told. The ids are asked of who has sent them: `resend`.
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

_FOUND_WITHIN = 5.0  # seconds; who does not find one tries again until the call's deadline
# Outputs do not wait behind gradients, nor the other way round.
LINES = ("claim", "backward")


class Workers:
    """All workers; each has a thread for each line, which makes its calls in order.

    resend: has the ids of a reference sent to its worker again, and returns when they are there. release: is
    told of references whose ids nobody needs any more; called when memory is freed, so it must not wait.
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
        self._leave = leave  # who finds them
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, str], Client] = {}
        self._lines: dict[tuple[int, str], _Line] = {}

    def __len__(self) -> int:
        return len(self._find)

    def begin(
        self,
        worker: int,
        line: str,
        method: str,
        head: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        *,
        engine: Mapping[str, Any],
        references: Sequence[IdsReference],
        then: Then = lambda answer: None,
    ) -> Future[Message]:
        """Call a worker, behind earlier calls; arrays must stay as they are until the answer is there.

        engine: what the worker is told if it does not know it. references: of the batches that the call is
        about. then: called with the answer, or with what went wrong, on the line's thread.
        """
        if not 0 <= worker < len(self):
            raise ValueError(f"Expected a reference to one of {len(self)} embedding workers, got {worker}.")
        work = partial(self._call, worker, line, method, head, arrays, engine, references)
        with self._lock:
            if (worker, line) not in self._lines:
                self._lines[worker, line] = _Line(f"karvan-{line} {worker}")
            return self._lines[worker, line].put(work, then)

    def bytes(self) -> tuple[int, int]:
        """Bytes of arrays sent and received so far."""
        peers = list(self._peers.values())
        return sum(peer.bytes_sent for peer in peers), sum(peer.bytes_received for peer in peers)

    def close(self) -> None:
        """Leave all of them; calls without an answer fail."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()
        for peer in peers:
            peer.close()
        self._leave()

    def _call(
        self,
        worker: int,
        line: str,
        method: str,
        head: Mapping[str, Any],
        arrays: Sequence[Array],
        engine: Mapping[str, Any],
        references: Sequence[IdsReference],
    ) -> Message:
        peer = self._peer(worker, line)
        due = clock.now() + self._timeout
        while True:
            answer = peer.call(method, head, arrays)
            needs, text = answer.head.get("needs"), f"{peer.name}: {answer.head.get('text')}"
            if needs is None:
                return answer
            if needs == "engine":
                peer.call("engine", engine)
                continue
            wanted = next((each for each in references if each.name == answer.head.get("reference")), None)
            if self.resend is None or wanted is None or clock.now() > due:
                raise RuntimeError(text)
            self.resend(wanted)

    def _peer(self, worker: int, line: str) -> Client:
        with self._lock:
            if (worker, line) not in self._peers:
                self._peers[worker, line] = Client(
                    f"embedding worker {worker}",
                    self._find[worker],
                    self._security,
                    hello={**self._hello, "worker": worker, "line": line},
                    deadline=self._timeout,
                    forgetful=True,
                    calls=WORKER_CALLS,
                )
            return self._peers[worker, line]


class _Line:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], Message], then: Then) -> Future[Message]:
        """Do it after what was put before."""
        job = _Job(work, then)
        self._queue.put(job)
        return job.made

    def close(self) -> None:
        """End after what was put before."""
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.do()
            del job  # with what it holds, while nothing is to be done


class _Job:
    def __init__(self, work: Callable[[], Message], then: Then) -> None:
        self.made: Future[Message] = Future()
        self._work = work
        self._then = then

    def do(self) -> None:
        try:
            answer = self._work()
        except Exception as error:
            self._then(error)
            self.made.set_exception(error)
        else:
            self._then(answer)
            self.made.set_result(answer)


def find_workers(addresses: Sequence[str] | None, hello: Mapping[str, Any], timeout: float) -> Workers | None:
    """The workers at these addresses, or those that the environment names; None if there are none."""
    security = Security.from_environment()
    directory, count = find_role(Role.EMBEDDING_WORKER, addresses, security)
    if not count:
        return None
    find = [partial(directory.find, Role.EMBEDDING_WORKER, worker, _FOUND_WITHIN) for worker in range(count)]
    return Workers(find, security, hello, timeout, directory.close)
