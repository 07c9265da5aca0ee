"""How trainers reach loaders: connections, calls that any of them can answer, and waiting for batches.

`BatchStream` takes batches of several sources, as they come. Its sources are the `LoaderChannel`s of fixed
shares, each of one loader (`loader_channel.py`), or `TaskStream`s, of tasks that any loader can read
(`task_stream.py`).

`LoaderConnection` has one call at a time, which fails at once if the connection is lost. Unlike a parameter
server, any other loader can answer the same call, so nobody waits for a lost one there. Before training, all
loaders are asked what they read (`ask_all`), but one that is lost keeps nobody from training: its batches say
what they were made of.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from karvan.activity import activity
from karvan.clock import clock
from karvan.protocol import loader as protocol
from karvan.protocol.loader import NoAnswerYet
from karvan.threads import map_on_threads
from karvan.wire import Client, Message, RefusedError, Security, WireError
from karvan.wire.message import Sent
from karvan.wire.schema import Call

_log = logging.getLogger("karvan.cluster")

_OTHERS_WAIT = 5.0  # seconds for which a lost loader keeps others waiting
_PAUSE = 0.1  # seconds
_ANSWER_WITHIN = 60.0  # seconds; a loader that has nothing to send says so after one
LEAVE_WITHIN = 2.0  # seconds
_WAKE = 1.0  # seconds between checks of a wait
_LONG = 60.0  # seconds without a batch after which a warning is logged, again and again

A = TypeVar("A")


class StreamSource(Protocol):
    """Where batches come from, under the lock of the stream that takes them."""

    waiting: deque[Any]

    @property
    def ended(self) -> bool:
        """Whether there will be no batches after those that wait."""

    def check(self, waited: float) -> None:
        """Raise if no batch will come, or none has come for so many seconds."""


S = TypeVar("S", bound=StreamSource)


class BatchStream(Generic[S]):
    """Takes batches of sources, which notify `changed` of every change."""

    errors_first = False  # whether an error of a source comes before the batches of the others

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False

    def _ready(self, sources: Sequence[S]) -> list[S]:
        """Those of the sources that have a batch, once there are some; none if all of them have ended."""
        with self._changed, self._wait_for(sources) as waited:
            while not self._closed:
                ready = [source for source in sources if source.waiting]
                over = all(source.ended for source in sources)
                if self.errors_first or not (ready or over):
                    for source in sources:
                        source.check(waited())
                if ready or over:
                    return ready
                self._changed.wait(_WAKE)
            return []

    def _wait_for(self, sources: Sequence[S]) -> contextlib.AbstractContextManager[Callable[[], float]]:
        """While `_ready` waits: for whom, if that is known; see `waiting_for`."""
        return contextlib.nullcontext(lambda: 0.0)


@contextlib.contextmanager
def waiting_for(loaders: Iterable[int], warn: Callable[[float], None]) -> Iterator[Callable[[], float]]:
    """While this thread waits for loaders, which heartbeats report.

    Yields a function for the seconds of the wait. It calls `warn` with them when they are many.
    """
    began = warned = clock.now()

    def waited() -> float:
        nonlocal warned
        now = clock.now()
        if now - warned > _LONG:
            warned = now
            warn(now - began)
        return now - began

    with contextlib.ExitStack() as waits:
        for loader in loaders:
            waits.enter_context(activity.waiting(f"loader-{loader}"))
        yield waited


@dataclass(frozen=True)
class LoaderAccess:
    """How a trainer reaches the `count` loaders of its job; timeout: seconds to wait for a lost one."""

    count: int
    find: Callable[[int], str]
    security: Security
    timeout: float


class LoaderLostError(Exception):
    """A loader cannot be reached, or the connection to it broke; the message names it and says why."""


class LoaderConnection:
    """One connection to loader number `loader`; after a `LoaderLostError` it is of no use any more."""

    def __init__(self, loader: int, access: LoaderAccess) -> None:
        self.name = f"loader {loader}"
        self._loader = loader
        self._access = access
        self._attempts = 0
        self._client = Client(
            self.name,
            self._find,
            access.security,
            hello={"loader": loader},
            deadline=_ANSWER_WITHIN,
            forgetful=True,
        )

    def call(self, call: Call[Any, A], head: Sent | None = None) -> Message[A]:
        """The loader's answer."""
        try:
            return self._client.call(call, head)
        except WireError as error:
            raise LoaderLostError(str(error)) from error
        except RefusedError as error:
            if self._client.connections:
                raise
            # Another service may listen at the address of a loader that was lost.
            raise LoaderLostError(str(error)) from error

    def leave(self) -> None:
        """Have the loader drop what it has read in advance, and disconnect."""
        with contextlib.suppress(WireError, RuntimeError, LoaderLostError):
            self._client.call(protocol.STOP_READING, deadline=LEAVE_WITHIN)
        self._client.close()

    def close(self) -> None:
        """Disconnect; a call of another thread fails."""
        self._client.begin_closing()

    def _find(self) -> str:
        """The address, once: an error of any other class than WireError ends the client's attempts."""
        self._attempts += 1
        if self._attempts > 1:
            raise LoaderLostError(f"the connection to {self.name} was lost")
        try:
            return self._access.find(self._loader)
        except WireError as error:
            raise LoaderLostError(str(error)) from error


TaskAnswer = Message[protocol.FailedTask | protocol.TaskBatch]


def read_batch(access: LoaderAccess, head: protocol.RequestedTasks) -> tuple[int, TaskAnswer]:
    """A batch by any loader, and which has given it; a WireError if none does in time."""
    due = clock.now() + access.timeout
    while True:
        for loader in range(access.count):
            with contextlib.suppress(LoaderLostError):
                return loader, ask(access, loader, protocol.READ_BATCH, head, lambda: True)
        if clock.now() > due:
            raise WireError(f"Expected one of {access.count} loaders to answer 'read_batch', got no answer.")


def ask_all(access: LoaderAccess, call: Call[Any, NoAnswerYet | A]) -> dict[int, Message[A]]:
    """The answers of all loaders, without those that are lost while others have answered."""
    answered: list[float] = []  # when

    def others_have() -> bool:
        return bool(answered) and clock.now() > answered[0] + _OTHERS_WAIT

    answers: dict[int, Message[A]] = {}

    def ask_in_time(loader: int) -> None:
        try:
            answers[loader] = ask(access, loader, call, {}, others_have)
            answered.append(clock.now())
        except LoaderLostError:
            _log.warning("loader %d cannot be reached; the others read its part.", loader)

    map_on_threads(ask_in_time, range(access.count), access.count)
    return dict(sorted(answers.items()))


def ask(
    access: LoaderAccess,
    loader: int,
    call: Call[Any, NoAnswerYet | A],
    head: Sent,
    give_up: Callable[[], bool] = lambda: False,
) -> Message[A]:
    """A loader's answer, which it has once its program serves data; a WireError if that takes too long.

    A LoaderLostError if it is lost, and `give_up` says that nobody has to wait for it.
    """
    due = clock.now() + access.timeout
    problem = "its program has not called serve"
    connection: LoaderConnection | None = None
    try:
        while True:
            try:
                connection = connection or LoaderConnection(loader, access)
                answer = connection.call(call, head)
                if not isinstance(answer.head, NoAnswerYet):
                    return Message(answer.head, answer.arrays)
            except LoaderLostError as error:
                problem, connection = str(error), None
                if give_up():
                    raise
                time.sleep(_PAUSE)
            if clock.now() > due:
                raise WireError(
                    f"Expected loader {loader} to answer {call.name!r} within {access.timeout:.3g} s, "
                    f"got: {problem}."
                )
    finally:
        if connection is not None:
            connection.close()
