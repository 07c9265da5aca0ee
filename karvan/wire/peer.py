"""`Peer`: calls to a service. Many may be under way; they are done and answered in order, each once.

Two threads serve a connection: one sends, one receives. When it breaks, or is silent for too long although
an answer is due, they begin another, with the calls that have not been answered.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from karvan.wire.errors import PeerLostError, RefusedError, WireError
from karvan.wire.message import SCHEMA, Array, Message, read, write
from karvan.wire.security import Security
from karvan.wire.server import TOLD

_LONGEST_PAUSE = 2.0  # seconds between two attempts to connect
_GOODBYE = 1.0  # seconds for a service to hang up


class Reply:
    """The answer to a call, once it is there."""

    def __init__(self, peer: Peer, call: Message, deadline: float) -> None:
        self._peer = peer
        self.call = call
        self.deadline = deadline
        self._done = threading.Event()
        self._answer: Message | None = None
        self._error: Exception | None = None
        self._then: Callable[[Reply], None] | None = None
        self.begun = time.monotonic()
        self.seconds = 0.0  # from the call to its answer

    def wait(self) -> Message:
        """The answer; what went wrong at the peer, or on the way to it, is raised here."""
        self._done.wait()
        if self._error is not None:
            raise self._error
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
        self.seconds = time.monotonic() - self.begun
        if isinstance(answer, Exception):
            self._error = answer
        else:
            self._answer = answer
        self.call = Message({})  # what it holds is not needed any more
        self._done.set()
        if self._then is not None:
            self._then(self)


class Peer:
    """One service to talk to.

    find: its address "host:port", or a function that gives it, asked at every attempt to connect.
    hello: what the service should know of its caller, or a function that gives it, called at every attempt.
    deadline: seconds for a call, all attempts included;
    a call that misses it is a WireError, and the peer is given up. patience: seconds of silence after which a
    connection counts as broken. forgetful: the service may begin anew and need not know earlier calls.
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
    ) -> None:
        self.name = name
        self._find = find if callable(find) else lambda: find
        self._security = security or Security()
        self._hello = hello if callable(hello) else partial(dict[str, Any], hello or {})
        self._deadline = deadline
        self._patience = patience
        self._forgetful = forgetful
        self._session = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._waiting: deque[Reply] = deque()  # calls without an answer, the oldest first
        self._sent = 0  # how many of them were sent on this connection
        self._answered = 0  # number of the last call that was answered
        self._broken: Exception | None = None  # why this connection is not good any more
        self._heard = 0.0  # when something came, or was first waited for
        self._failure: Exception | None = None  # why there are no more calls
        self._closing = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.connections = 0
        self.welcome: dict[str, Any] = {}  # what the service said when it was met
        self._thread = threading.Thread(target=self._run, name=f"karvan-peer {name}", daemon=True)
        self._thread.start()

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
        message = Message({**(head or {}), "method": method}, arrays)
        reply = Reply(self, message, time.monotonic() + (deadline or self._deadline))
        reply._then = then
        with self._changed:
            if self._failure is not None:
                raise self._failure
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
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._patience)

    def _run(self) -> None:
        attempt = 0
        problem = "no answer"
        while self._wait_for_calls():
            connections = self.connections
            try:
                self._talk()
            except (PeerLostError, RefusedError) as error:
                self._give_up(error)
                return
            except (pa.ArrowException, OSError, StopIteration) as error:
                problem = str(error).partition(". gRPC client debug")[0].partition("\n")[0] or "it hung up"
            attempt = 0 if self.connections > connections else attempt + 1
            if not self._closing and not self._pause(attempt, problem):
                return
        self._give_up(WireError(f"{self.name} was left before it had answered."))

    def _wait_for_calls(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return not self._closing

    def _pause(self, attempt: int, problem: str) -> bool:
        """Wait before the next attempt; whether there is to be one."""
        with self._changed:
            due = self._waiting[0].deadline if self._waiting else time.monotonic() + _LONGEST_PAUSE
            pause = min(_LONGEST_PAUSE, 0.02 * 2**attempt) * random.uniform(0.5, 1)
            self._changed.wait_for(lambda: self._closing, max(0.0, min(pause, due - time.monotonic())))
        if time.monotonic() < due:
            return True
        self._give_up(self._late(problem))
        return False

    def _late(self, problem: str) -> WireError:
        waiting = self._waiting[0]
        method = waiting.call.head.get("method")
        seconds = waiting.deadline - waiting.begun
        return WireError(f"{self.name} expected to answer {method!r} within {seconds:.0f} s, got: {problem}.")

    def _give_up(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            waiting, self._waiting = list(self._waiting), deque()
        for reply in waiting:
            reply.set(error)

    def _talk(self) -> None:
        """One connection, until it breaks or is not needed any more."""
        client, writer, reader = self._connect()
        receiver = threading.Thread(
            target=self._receive, args=(reader,), name=f"karvan-answers {self.name}", daemon=True
        )
        try:
            receiver.start()
            self._send(writer)
            receiver.join(_GOODBYE)
        finally:
            with contextlib.suppress(pa.ArrowException, OSError):
                reader.cancel()
            receiver.join()
            for each in (writer, client):
                with contextlib.suppress(pa.ArrowException, OSError):
                    each.close()

    def _connect(self) -> tuple[Any, Any, Any]:
        host, _, port = self._find().rpartition(":")
        location = self._security.location(host, int(port))
        client = flight.FlightClient(location, **self._security.client_options())
        try:
            options = flight.FlightCallOptions(headers=self._security.headers())
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"karvan"), options)
            timer = threading.Timer(self._patience, reader.cancel)
            timer.daemon = True
            timer.start()
            try:
                writer.begin(SCHEMA)
                write(writer, Message({**self._hello(), "method": "hello", "session": self._session}))
                said = read(reader.read_chunk).head
            finally:
                timer.cancel()
            self._meet(said)
        except flight.FlightUnauthenticatedError as error:
            client.close()
            raise RefusedError(
                f"{self.name} refused: expected the job's token, got none or another."
            ) from error
        except BaseException:
            client.close()
            raise
        return client, writer, reader

    def _meet(self, said: dict[str, Any]) -> None:
        if "error" in said:
            raise RefusedError(f"{self.name} refused: {said.get('text')}")
        with self._changed:
            again = self._answered > 0 and said.get("last") == 0
            if again and not self._forgetful:
                raise PeerLostError(f"{self.name} has begun anew: what it held is lost.")
            if again:
                self._answered = 0  # the service counts from 1 again
            self.welcome = said
            self._broken, self._sent = None, 0
            self._heard = time.monotonic()
            self.connections += 1

    def _send(self, writer: Any) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._something_to_do, 0.5)
                if self._broken is not None:
                    raise self._broken
                if self._closing:
                    break
                now = time.monotonic()
                if self._waiting and now > self._waiting[0].deadline:
                    raise WireError("no answer in time")
                if self._sent and now > self._heard + self._patience:
                    raise WireError(f"silence for {self._patience:.0f} s")
                if self._sent == len(self._waiting):
                    continue
                if self._sent == 0:
                    self._heard = now
                call = self._waiting[self._sent].call
                self._sent += 1
                numbered = {"number": self._answered + self._sent, "received": self._answered}
            message = Message({**call.head, **numbered}, call.arrays)
            write(writer, message)
            self.bytes_sent += message.bytes
        with contextlib.suppress(pa.ArrowException, OSError):
            write(writer, Message({"method": "bye"}))  # it hangs up then

    def _something_to_do(self) -> bool:
        return self._broken is not None or self._closing or self._sent < len(self._waiting)

    def _receive(self, reader: Any) -> None:
        try:
            while True:
                self._take(read(reader.read_chunk))
        except (pa.ArrowException, OSError, StopIteration, RefusedError) as error:
            with self._changed:
                self._broken = error if not isinstance(error, StopIteration) else WireError("it hung up")
                self._changed.notify_all()

    def _take(self, answer: Message) -> None:
        with self._changed:
            self._heard = time.monotonic()
            if "busy" in answer.head:
                return
            if "closing" in answer.head:
                raise WireError("it ends")
            if answer.head.get("fatal"):
                raise RefusedError(f"{self.name} refused: {answer.head.get('text')}")
            if not self._sent or answer.head.get("number") != self._answered + 1:
                raise RefusedError(f"{self.name} gave an answer that was not asked for.")
            reply = self._waiting.popleft()
            self._sent -= 1
            self._answered += 1
            self.bytes_received += answer.bytes
        if "error" in answer.head:
            kind = TOLD.get(answer.head["error"], RuntimeError)
            reply.set(kind(f"{self.name}: {answer.head.get('text')}"))
        else:
            reply.set(answer)
