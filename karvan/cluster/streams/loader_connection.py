"""`LoaderConnection`: calls of a trainer to one loader, which fail at once if the connection is lost.

Unlike a parameter server, any other loader can answer the same call, so nobody waits for a lost one here.
Before training, all loaders are asked what they read (`ask_all`), but one that is lost keeps nobody from
training: its batches say what they were made of.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from karvan.clock import clock
from karvan.protocol.loader import (
    READ_BATCH,
    STOP_READING,
    FailedTask,
    NoAnswerYet,
    RequestedTasks,
    TaskBatch,
)
from karvan.threads import map_on_threads
from karvan.wire import Client, Message, RefusedError, Security, WireError
from karvan.wire.message import Sent
from karvan.wire.schema import Call

_log = logging.getLogger("karvan.cluster")
A = TypeVar("A")

_OTHERS_WAIT = 5.0  # seconds for which a lost loader keeps others waiting
_PAUSE = 0.1  # seconds
_ANSWER_WITHIN = 60.0  # seconds; a loader that has nothing to send says so after one
_LEAVE_WITHIN = 2.0  # seconds


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
            self._client.call(STOP_READING, deadline=_LEAVE_WITHIN)
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


def ask_one(access: LoaderAccess, loader: int, call: Call[Any, NoAnswerYet | A], head: Sent) -> Message[A]:
    """A loader's answer, which it has once its program serves data; a WireError if that takes too long."""
    answer = _ask(access, loader, call, head, lambda: False)
    assert answer is not None
    return answer


def read_batch(access: LoaderAccess, head: RequestedTasks) -> tuple[int, Message[FailedTask | TaskBatch]]:
    """A batch by any loader, and which has given it; a WireError if none does in time."""
    answer: Message[FailedTask | TaskBatch] | None
    due = clock.now() + access.timeout
    while True:
        for loader in range(access.count):
            answer = _ask(access, loader, READ_BATCH, head, lambda: True)
            if answer is not None:
                return loader, answer
        if clock.now() > due:
            raise WireError(f"Expected one of {access.count} loaders to answer 'read_batch', got no answer.")


def ask_all(access: LoaderAccess, call: Call[Any, NoAnswerYet | A]) -> dict[int, Message[A]]:
    """The answers of all loaders, without those that are lost while others have answered."""
    answered: list[float] = []  # when

    def others_have() -> bool:
        return bool(answered) and clock.now() > answered[0] + _OTHERS_WAIT

    def ask(loader: int) -> Message[A] | None:
        answer = _ask(access, loader, call, {}, others_have)
        if answer is not None:
            answered.append(clock.now())
        return answer

    descriptions = dict(enumerate(map_on_threads(ask, range(access.count), access.count)))
    for loader, answer in descriptions.items():
        if answer is None:
            _log.warning("loader %d cannot be reached; the others read its part.", loader)
    return {loader: answer for loader, answer in descriptions.items() if answer is not None}


def _ask(
    access: LoaderAccess,
    loader: int,
    call: Call[Any, NoAnswerYet | A],
    head: Sent,
    give_up: Callable[[], bool],
) -> Message[A] | None:
    """A loader's answer; None if it is lost, and `give_up` says that nobody has to wait for it."""
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
                    return None
                time.sleep(_PAUSE)
            if clock.now() > due:
                raise WireError(
                    f"Expected loader {loader} to answer {call.name!r} within {access.timeout:.3g} s, "
                    f"got: {problem}."
                )
    finally:
        if connection is not None:
            connection.close()
