"""`Client`: calls to a service. Many may be under way; they are done and answered in order, each once.

Three threads serve a connection: one sends, one receives, one watches the time. When it breaks, or is silent
for too long although an answer is due, it is cancelled, and the first thread begins another one with the
calls that have not been answered. The service knows those that it has done.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from karvan.activity import activity
from karvan.clock import clock
from karvan.outages import mark
from karvan.wire.errors import BusyError, PeerLostError, RefusedError, WireError
from karvan.wire.exit_hooks import close_at_exit, closed
from karvan.wire.flight_connection import FlightConnection, short
from karvan.wire.message import Array, Message, Packed, pack
from karvan.wire.schema.calls import CallTable
from karvan.wire.security.credentials import Security
from karvan.wire.server import TOLD

_log = logging.getLogger("karvan.wire")

_CONNECT = 5.0  # seconds for one attempt to connect
_LONGEST_PAUSE = 2.0  # seconds between two of them
_GOODBYE = 1.0  # seconds until a peer is left without a good-bye
_SLOWEST = 8e6  # bytes per second: more patience for more bytes


class Reply:
    """The answer to a call, once it is there."""

    def __init__(
        self, peer: Client, method: str, head: Mapping[str, Any], call: Packed, within: float
    ) -> None:
        self._peer = peer
        self.method = method
        self.head = head
        self.call = call
        self.bytes = sum(array.nbytes for array in call.arrays)
        self.begun = clock.now()
        self.within = within  # seconds
        self.deadline = self.begun + within
        self._done = threading.Event()
        self._answer: Message | None = None
        self._error: Exception | None = None
        self._then: Callable[[Reply], None] | None = None
        self.seconds = 0.0  # from the call to its answer

    def wait(self) -> Message:
        """The answer; what went wrong at the peer, or on the way to it, is raised here."""
        self._peer.check_process()
        if not self._done.is_set():
            with activity.waiting(self._peer.role):
                self._done.wait()
        if self._error is not None:
            raise _same(self._error)
        assert self._answer is not None
        return self._answer

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    @property
    def error(self) -> Exception | None:
        """What `wait` would raise, once it is done."""
        return self._error

    def pause(self, seconds: float) -> None:
        """Wait for the answer, but not longer than that."""
        self._done.wait(seconds)

    def set(self, answer: Message | Exception) -> None:
        """What the peer has said, or why it has not; for the peer's own threads."""
        self.seconds = clock.now() - self.begun
        if isinstance(answer, Exception):
            self._error = answer
        else:
            self._answer = answer
        self.call = Packed("{}", ())  # what it holds is not needed any more
        self._done.set()
        if self._then is not None:
            try:
                self._then(self)
            except Exception:
                _log.exception("What was to be done after %r of %s failed", self.method, self._peer.name)


class Client:
    """One service to talk to.

    find: its address "host:port", or a function that gives it, asked at every attempt to connect.
    hello: what the service should know of its caller, or a function that gives it, called at every attempt.
    deadline: seconds for a call, all attempts included;
    a call that misses it is a WireError, and the peer is given up. patience: seconds of silence after which a
    connection counts as broken. forgetful: the service may begin anew and need not know earlier calls.
    anew: gives the calls, each with its head, that a service which has begun anew must get before any other;
    it is told the name of the service's new life. calls: the declared calls of the service; answers are held
    against them, and one that is otherwise is a RefusedError of that call.
    """

    def __init__(
        self,
        name: str,
        find: str | Callable[[], str],
        security: Security | None = None,
        *,
        hello: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        deadline: float = 120.0,
        patience: float = 10.0,
        forgetful: bool = False,
        anew: Callable[[str], Sequence[tuple[str, Mapping[str, Any]]]] | None = None,
        calls: CallTable | None = None,
    ) -> None:
        self.name = name
        self.role = "-".join(name.split())  # as launched jobs call their processes: parameter-server-0
        self._find = find if callable(find) else lambda: find
        self._security = security or Security()
        self._session = secrets.token_hex(16)
        self._hello = hello if callable(hello) else partial(dict[str, Any], hello or {})
        self._deadline = deadline
        self._patience = patience
        self._forgetful = forgetful or anew is not None
        self._anew = anew
        self._calls = calls or {}
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Reply] = deque()  # calls without an answer, the oldest first
        self._sent = 0  # how many of them were sent on this connection
        self._sent_bytes = 0  # theirs
        self._answered = 0  # number of the last call that was answered
        self._numbered = 0  # the highest number that a call was sent with
        self._broken: Exception | None = None  # why this connection is not good any more
        self._heard = 0.0  # when something came, or was first waited for
        self._failure: Exception | None = None  # why there are no more calls
        self._closing = 0.0  # since when
        self.bytes_sent = 0
        self.bytes_received = 0
        self.connections = 0
        self.welcome: dict[str, Any] = {}  # what the service said when it was met
        self._receiver: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"karvan-peer {name}", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def begin(
        self,
        method: str,
        head: Mapping[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        *,
        then: Callable[[Reply], None] | None = None,
        deadline: float | None = None,
    ) -> Reply:
        """Call; arrays must stay as they are until the answer is there.

        then: called with the reply once it is there, on a thread of the peer, so it must not wait.
        """
        self.check_process()
        call = pack(Message({**(head or {}), "method": method}, arrays))
        seconds = self._deadline if deadline is None else deadline
        reply = Reply(self, method, head or {}, call, seconds)
        reply._then = then
        with self._changed:
            if self._failure is not None:
                raise _same(self._failure)
            if self._closing:
                raise WireError(f"{self.name} was left, got a call of {method!r}.")
            self._waiting.append(reply)
            self._changed.notify_all()
        return reply

    def call(
        self,
        method: str,
        head: Mapping[str, Any] | None = None,
        arrays: Sequence[Array] = (),
        *,
        deadline: float | None = None,
    ) -> Message:
        """Call and wait for the answer."""
        return self.begin(method, head, arrays, deadline=deadline).wait()

    def close(self) -> None:
        """Leave; calls without an answer fail."""
        if os.getpid() != self._process:
            return
        self.begin_closing()
        if threading.current_thread() not in (self._thread, self._receiver):
            self._thread.join(_CONNECT + 2 * _GOODBYE)
            self._give_up(WireError(f"{self.name} was left before it had answered."))

    @property
    def closing(self) -> bool:
        """Whether `close` was called, so that calls fail on purpose."""
        return bool(self._closing)

    def begin_closing(self) -> None:
        """Take no more calls, and say good-bye; `close` waits for that."""
        closed(self)
        with self._changed:
            self._closing = self._closing or clock.now()
            self._changed.notify_all()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check_process(self) -> None:
        """Raise in a process that was forked: the threads are in the one it came from."""
        if os.getpid() != self._process:
            raise RuntimeError(f"{self.name} expects calls of the process that made the peer, got a fork's.")

    def _run(self) -> None:
        attempt = 0
        while self._wait_for_calls():
            connections = self.connections
            try:
                self._talk()
                problem = "it was left"
            except WireError as error:
                if isinstance(error, PeerLostError):
                    self._give_up(error)
                    return
                problem = str(error)
            except (pa.ArrowException, OSError, StopIteration) as error:
                problem = short(error)
            except Exception as error:  # refused, or a mistake in what was asked for
                self._give_up(error)
                return
            attempt = 0 if self.connections > connections else attempt + 1
            if not self._pause(attempt, problem):
                return
        self._give_up(WireError(f"{self.name} was left before it had answered."))

    def _wait_for_calls(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return not self._closing

    def _pause(self, attempt: int, problem: str) -> bool:
        """Wait before the next attempt; whether there is to be one."""
        with self._changed:
            pause = min(_LONGEST_PAUSE, 0.02 * 2 ** min(attempt, 10)) * random.uniform(0.5, 1)
            left = self._due() - clock.now()
            self._changed.wait_for(lambda: self._closing, max(0.0, min(pause, left)))
            now = clock.now()
            late = next((each for each in self._waiting if now >= each.deadline), None)
        if late is None:
            return True
        expected = f"{self.name} expected to answer {late.method!r} within {late.within:.3g} s"
        self._give_up(WireError(f"{expected}, got: {problem.removesuffix('.')}."))
        return False

    def _due(self) -> float:
        return min((each.deadline for each in self._waiting), default=float("inf"))

    def _give_up(self, error: Exception) -> None:
        closed(self)
        with self._changed:
            self._failure = self._failure or error
            waiting, self._waiting = list(self._waiting), deque()
            self._sent = self._sent_bytes = 0
        for reply in waiting:
            reply.set(error)

    def _talk(self) -> None:
        """One connection, until it breaks or is not needed any more."""
        with self._changed:
            self._broken = None
            limit = max(0.1, min(_CONNECT, self._patience, self._due() - clock.now()))
        connection = FlightConnection(self._find(), self._security, limit)
        over = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(connection, over, clock.now() + limit), daemon=True
        )
        watcher.start()
        try:
            try:
                times = {"patience": self._patience, "deadline": self._deadline}
                said = connection.meet({**self._hello(), "session": self._session, **times})
            except RefusedError as error:
                raise RefusedError(f"{self.name} refused: {error}.") from error
            self._meet(said)
            self._receiver = threading.Thread(
                target=self._receive, args=(connection,), name=f"karvan-answers {self.name}", daemon=True
            )
            self._receiver.start()
            try:
                self._send(connection)
            except (pa.ArrowException, OSError) as error:
                raise self._why(error) from error
        finally:
            over.set()
            connection.cancel()
            watcher.join()
            if self._receiver is not None:
                self._receiver.join()
                self._receiver = None
            connection.close()

    def _meet(self, said: dict[str, Any]) -> None:
        if said.get("error") == BusyError.__name__:
            raise BusyError(f"{self.name} is busy: {said.get('text')}")
        if "error" in said:
            raise RefusedError(f"{self.name} refused: {said.get('text')}")
        incarnation, last = said.get("incarnation"), said.get("last")
        if not isinstance(incarnation, str) or type(last) is not int:
            raise RefusedError(f"{self.name} expected to be a service of Karvan, got something else.")
        with self._changed:
            anew = incarnation != self.welcome.get("incarnation", incarnation)
            forgotten = anew or last < self._answered
            unsure = self._numbered > (0 if anew else self._answered)
            if forgotten and unsure and not self._forgetful:
                raise PeerLostError(f"{self.name} has begun anew: what it held is lost.")
            if forgotten:
                self._answered = self._numbered = 0  # the service counts from 1 again
                if self._anew is not None and unsure:
                    first = [self._first(*each) for each in self._anew(incarnation)]
                    self._waiting.extendleft(reversed(first))
            self.welcome = said
            self._sent = self._sent_bytes = 0
            self._heard = clock.now()
            self.connections += 1

    def _first(self, method: str, head: Mapping[str, Any]) -> Reply:
        """A call that nobody waits for; what is wrong with it ends the peer."""
        call = pack(Message({**head, "method": method}))
        reply = Reply(self, method, head, call, self._deadline)
        reply._then = lambda answered: self._give_up(answered.error) if answered.error else None
        return reply

    def _send(self, connection: FlightConnection) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._something_to_do)
                if self._broken is not None:
                    raise self._broken
                if self._closing:
                    break
                reply = self._waiting[self._sent]
                if self._sent == 0:
                    self._heard = clock.now()
                self._sent += 1
                self._sent_bytes += reply.bytes
                number, received = self._answered + self._sent, self._answered
                self._numbered = max(self._numbered, number)
                call = reply.call
            # The service keeps what it knows of this caller for that long after a connection broke.
            longer = {"within": math.ceil(min(reply.within, 2**31))} if reply.within > self._deadline else {}
            connection.write(call, number=number, received=received, **longer)
            self.bytes_sent += reply.bytes
        with contextlib.suppress(pa.ArrowException, OSError):
            connection.write(pack(Message({"method": "bye"})))
            with self._changed:  # the service hangs up once it has read that, which is after its calls
                self._changed.wait_for(lambda: self._broken is not None, 0.05 if self._sent else _GOODBYE)

    def _why(self, error: Exception) -> Exception:
        """Why a write failed: the other threads know more, such as what the service has said at last."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None, 0.5)
            return self._broken or error

    def _something_to_do(self) -> bool:
        return self._broken is not None or bool(self._closing) or self._sent < len(self._waiting)

    def _watch(self, connection: FlightConnection, over: threading.Event, meet_by: float) -> None:
        """Cancel a connection that takes too long for anything."""
        before = self.connections
        while not over.wait(min(0.5, self._patience / 4)):
            with self._changed:
                now = clock.now()
                problem = self._overdue(now)
                if self.connections == before and (now > meet_by or self._closing):
                    problem = "no answer to hello"
                if problem and self._broken is None:
                    self._broken = WireError(problem)
                    self._changed.notify_all()
            if problem:
                connection.cancel()

    def _overdue(self, now: float) -> str:
        if self._closing:
            return "it was left" if now > self._closing + _GOODBYE else ""
        if now > self._due():
            return "no answer in time"
        patience = self._patience + self._sent_bytes / _SLOWEST
        if self._sent and clock.silence(self._heard) > patience:
            return f"silence for {patience:.3g} s"
        return ""

    def _receive(self, connection: FlightConnection) -> None:
        try:
            while True:
                self._take(connection.read())
        except Exception as error:
            with self._changed:
                if self._broken is None:
                    self._broken = WireError("it hung up") if isinstance(error, StopIteration) else error
                self._changed.notify_all()

    def _take(self, answer: Message) -> None:
        with self._changed:
            self._heard = clock.now()
            if "busy" in answer.head:
                self._heard += answer.head.get("bytes", 0) / _SLOWEST
                return
            if answer.head.get("fatal"):
                raise RefusedError(f"{self.name} refused: {answer.head.get('text')}")
            if not self._sent or answer.head.get("number") != self._answered + 1:
                raise RefusedError(f"{self.name} gave an answer that was not asked for.")
            reply = self._waiting.popleft()
            self._sent -= 1
            self._sent_bytes -= reply.bytes
            self._answered += 1
            self.bytes_received += answer.bytes
        if "error" in answer.head:
            kind = TOLD.get(str(answer.head["error"]), RuntimeError)
            text, cause = f"{self.name}: {answer.head.get('text')}", answer.head.get("errno")
            error = kind(cause, text) if kind is OSError and isinstance(cause, int) else kind(text)
            if isinstance(temporary := answer.head.get("temporary"), bool):
                mark(error, temporary)
            reply.set(error)
        else:
            reply.set(self._checked(reply, answer))

    def _checked(self, reply: Reply, answer: Message) -> Message | Exception:
        declared = self._calls.get(reply.method)
        if declared is None:
            return answer
        try:
            return declared.check_answer(reply.head, answer)
        except RefusedError as error:
            return RefusedError(f"{self.name}: {error}")


def _same(error: Exception) -> Exception:
    """A copy, for each who gets it: a traceback belongs to one thread."""
    try:
        made = type(error)(*error.args)
    except Exception:  # of a kind that is made in another way
        return error
    made.__dict__.update(error.__dict__)
    return made
