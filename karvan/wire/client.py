"""`Client`: calls to a service. Many may be in flight; they are executed and answered in order, each once.

Three threads serve a connection: one sends, one receives, one checks deadlines. When the connection breaks,
or is silent for too long although an answer is due, it is cancelled, and the first thread opens another one
and sends the calls that have not been answered. The service knows which of them it has executed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, cast

import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import TypeVar

from karvan.activity import activity
from karvan.clock import clock
from karvan.errors import BusyError, PeerLostError, RefusedError, WireError, mark, retry_delay
from karvan.job.address import location, split_address
from karvan.process_end import close_at_exit, closed
from karvan.wire.message import SCHEMA, Array, Message, Packed, Sent, pack, read, write
from karvan.wire.schema import Call
from karvan.wire.security import Security
from karvan.wire.server import REPORTED_ERRORS

# `FlightConnection`: a caller's two streams to a service, for calls and for answers (see `server.py`).


# Parts of the messages of failed TLS handshakes, and what they mean. Trying again does not help.
_HOPELESS = {
    "certificate verify failed": "expected a certificate of the authority this caller trusts, got another",
    "not in peer certificate": "expected a certificate with the service's name, got one with another",
    "ostname verification": "expected a certificate with the service's name, got one with another",
    "wrong version number": "expected a service with TLS, got one without",
}


class FlightConnection:
    """One connection. One thread may write and another one read; any thread may cancel."""

    def __init__(self, address: str, security: Security, seconds: float) -> None:
        """Nothing is sent yet. seconds: how long one attempt to connect may take."""
        host, port = split_address(address)
        security.check_target(host)
        self._security = security = security.at(host)
        options = security.client_options()
        options["generic_options"] = [
            ("grpc.enable_http_proxy", 0),  # roles connect to each other, not to the internet
            ("grpc.min_reconnect_backoff_ms", max(100, int(1000 * seconds))),  # the time for one attempt
        ]
        self._lock = threading.Lock()
        self._cancelled = False
        self._readers: list[Any] = []
        self._writers: list[Any] = []
        self._client = flight.FlightClient(location(host, port, security.tls), **options)

    def handshake(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Send the hello; returns the service's welcome, or its refusal."""
        name = secrets.token_hex(16)
        try:
            reader = self._stream({**hello, "method": "hello", "connection": name})
            welcome = read(reader.read_chunk).head
            if "error" not in welcome:
                self._stream({"method": "calls", "connection": name})
        except pa.ArrowException as error:
            raise _explained(error, self._security) from error
        return welcome

    def write(self, packed: Packed, **numbers: int) -> None:
        """Send a call."""
        write(self._writers[1], packed, **numbers)

    def read(self) -> Message:
        """The next message of the service."""
        return read(self._readers[0].read_chunk)

    def cancel(self) -> None:
        """Make reads and writes fail, also those in progress."""
        with self._lock:
            self._cancelled = True
            for reader in self._readers:
                with contextlib.suppress(pa.ArrowException, OSError):
                    reader.cancel()

    def close(self) -> None:
        """End it; no thread may be reading or writing any more."""
        self.cancel()
        for connection in (*self._writers, self._client):
            with contextlib.suppress(pa.ArrowException, OSError):
                connection.close()

    def _stream(self, first: dict[str, Any]) -> Any:
        options = flight.FlightCallOptions(headers=self._security.headers())
        writer, reader = self._client.do_exchange(flight.FlightDescriptor.for_command(b"karvan"), options)
        with self._lock:
            self._readers.append(reader)
            self._writers.append(writer)
            if self._cancelled:
                reader.cancel()
        writer.begin(SCHEMA)
        write(writer, pack(Message(first)))
        return reader


def short(error: BaseException) -> str:
    """The text of an error, without the debug information that gRPC adds."""
    text = str(error).partition(". gRPC client debug")[0].partition(". Client context:")[0].partition("\n")[0]
    return text.rpartition("last error: ")[2] or type(error).__name__


def _explained(error: Exception, security: Security) -> Exception:
    text = str(error).lower()
    if isinstance(error, flight.FlightUnauthenticatedError) and "job's token" in text:
        return RefusedError("expected the job's token, got none or another")
    for sign, meaning in _HOPELESS.items():
        if sign in text:
            return RefusedError(meaning)
    closed = any(sign in text for sign in ("socket closed", "connection reset", "broken pipe"))
    if closed and not security.tls:
        return WireError(f"{short(error)} (perhaps it expects TLS, which this caller does not use)")
    if closed and not security.mutual:
        return WireError(
            f"{short(error)} (perhaps it expects a certificate, which this caller does not have)"
        )
    return WireError(short(error))


_log = logging.getLogger("karvan.wire")

_CONNECT = 5.0  # seconds for one attempt to connect
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 2.0  # seconds between two attempts
_GOODBYE = 1.0  # seconds to wait for the service to end the connection after a good-bye
_SLOWEST = 8e6  # bytes per second that any network is assumed to carry: large messages get more time


A = TypeVar("A", default=Any)
Declared: TypeAlias = Call[Any, A] | str


class Reply(Generic[A]):
    """The answer to a call, once it has arrived; one to a declared call has been checked."""

    def __init__(
        self, peer: Client, declared: Declared[A], head: Sent, arrays: Sequence[Array], within: float
    ) -> None:
        self._peer = peer
        self._declared = declared
        self.method = declared if isinstance(declared, str) else declared.name
        self._head = head
        fields = head if isinstance(head, Mapping) else head.as_json()
        self.call = pack(Message({**fields, "method": self.method}, arrays))
        self.bytes = sum(array.nbytes for array in arrays)
        self.started = clock.now()
        self.within = within  # seconds
        self.deadline = self.started + within
        self._done = threading.Event()
        self._answer: Message[A] | None = None
        self.error: Exception | None = None  # that `wait` raises once it is done
        self._then: Callable[[Reply[A]], None] | None = None
        self.seconds = 0.0  # from the call to its answer

    def wait(self) -> Message[A]:
        """The answer; raises the error of the service, or of the connection to it."""
        self._peer.check_process()
        if not self._done.is_set():
            with activity.waiting(self._peer.role):
                self._done.wait()
        if self.error is not None:
            raise _copy_of(self.error)
        assert self._answer is not None
        return self._answer

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def pause(self, seconds: float) -> None:
        """Wait for the answer for at most this long."""
        self._done.wait(seconds)

    def answer(self, message: Message) -> None:
        """Set the answer, unless it differs from its declaration; for the client's own threads."""
        if isinstance(self._declared, str):
            self.set(cast("Message[A]", message))
            return
        try:
            self.set(self._declared.check_answer(self._head, message))
        except RefusedError as error:
            self.set(RefusedError(f"{self._peer.name}: {error}"))

    def set(self, answer: Message[A] | Exception) -> None:
        """Set the answer, or why there is none; for the client's own threads."""
        self.seconds = clock.now() - self.started
        if isinstance(answer, Exception):
            self.error = answer
        else:
            self._answer = answer
        self.call = Packed("{}", ())  # releases the arrays
        self._done.set()
        if self._then is not None:
            try:
                self._then(self)
            except Exception:
                _log.exception("The callback after the call %r of %s failed", self.method, self._peer.name)


class Client:
    """A client of one service.

    find: its address "host:port", or a function that returns it, called at every attempt to connect.
    hello: what the service should know of its caller, or a function that returns it, called at every attempt.
    deadline: seconds for a call, all attempts included; a call that misses it is a WireError, and the client
    gives up. patience: seconds of silence after which a connection counts as broken. forgetful: the service
    may restart and need not know earlier calls. on_restart: returns the calls, each with its head, that a
    restarted service must get before any other; its argument is the service's new incarnation.
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
        on_restart: Callable[[str], Sequence[tuple[Declared[Any], Sent]]] | None = None,
    ) -> None:
        self.name = name
        self.role = "-".join(name.split())  # as launched jobs call their processes: parameter-server-0
        self._find = find if callable(find) else lambda: find
        self._security = security or Security()
        self._session = secrets.token_hex(16)
        self._hello = hello if callable(hello) else partial(dict[str, Any], hello or {})
        self._deadline = deadline
        self._patience = patience
        self._forgetful = forgetful or on_restart is not None
        self._on_restart = on_restart
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[Reply[Any]] = deque()  # calls without an answer, the oldest first
        self._sent = 0  # how many of them were sent on this connection
        self._sent_bytes = 0  # of these calls
        self._answered = 0  # number of the last call that was answered
        self._numbered = 0  # the highest number that a call was sent with
        self._broken: Exception | None = None  # why this connection cannot be used any more
        self._heard = 0.0  # when something was received, or first waited for
        self._failure: Exception | None = None  # why no more calls are accepted
        self._closing = 0.0  # since when
        self.bytes_sent = 0
        self.bytes_received = 0
        self.connections = 0
        self.welcome: dict[str, Any] = {}  # the service's answer to the hello
        self._receiver: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name=f"karvan-peer {name}", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def begin(
        self,
        call: Declared[A],
        head: Sent | None = None,
        arrays: Sequence[Array] = (),
        *,
        then: Callable[[Reply[A]], None] | None = None,
        deadline: float | None = None,
    ) -> Reply[A]:
        """Start a call; arrays must not change until the answer has arrived.

        An answer that differs from the declaration of the call is a RefusedError; that to a name is any.

        then: called with the reply once it has arrived, on a thread of the client, so it must not block.
        """
        self.check_process()
        seconds = self._deadline if deadline is None else deadline
        reply = Reply(self, call, head or {}, arrays, seconds)
        reply._then = then
        with self._changed:
            if self._failure is not None:
                raise _copy_of(self._failure)
            if self._closing:
                raise WireError(f"The connection to {self.name} was closed, got a call of {reply.method!r}.")
            self._waiting.append(reply)
            self._changed.notify_all()
        return reply

    def call(
        self,
        call: Declared[A],
        head: Sent | None = None,
        arrays: Sequence[Array] = (),
        *,
        deadline: float | None = None,
    ) -> Message[A]:
        """Call and wait for the answer."""
        return self.begin(call, head, arrays, deadline=deadline).wait()

    def close(self) -> None:
        """Disconnect; calls without an answer fail."""
        if os.getpid() != self._process:
            return
        self.begin_closing()
        if threading.current_thread() not in (self._thread, self._receiver):
            self._thread.join(_CONNECT + 2 * _GOODBYE)
            self._give_up(WireError(f"The connection to {self.name} was closed before it had answered."))

    @property
    def closing(self) -> bool:
        """Whether `close` was called, so that calls fail on purpose."""
        return bool(self._closing)

    @property
    def failed(self) -> bool:
        """Whether it has given up, not being closed: every call fails, and another client may do better."""
        return self._failure is not None and not self._closing

    def begin_closing(self) -> None:
        """Accept no more calls and say good-bye, without waiting; `close` waits."""
        closed(self)
        with self._changed:
            self._closing = self._closing or clock.now()
            self._changed.notify_all()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check_process(self) -> None:
        """Raise in a forked process: the threads are in its parent."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"The client of {self.name} expects calls of its own process, got one from a fork."
            )

    def _run(self) -> None:
        attempt = 0
        while self._wait_for_calls():
            connections = self.connections
            try:
                self._talk()
                problem = "the connection was closed"
            except WireError as error:
                if isinstance(error, PeerLostError):
                    self._give_up(error)
                    return
                problem = str(error)
            except (pa.ArrowException, OSError, StopIteration) as error:
                problem = short(error)
            except Exception as error:  # refused, or a mistake in the call
                self._give_up(error)
                return
            attempt = 0 if self.connections > connections else attempt + 1
            if not self._pause(attempt, problem):
                return
        self._give_up(WireError(f"The connection to {self.name} was closed before it had answered."))

    def _wait_for_calls(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return not self._closing

    def _pause(self, attempt: int, problem: str) -> bool:
        """Wait before the next attempt; returns whether there is one."""
        with self._changed:
            pause = retry_delay(_FIRST_PAUSE, attempt, _LONGEST_PAUSE)
            remaining = self._due() - clock.now()
            self._changed.wait_for(lambda: self._closing, max(0.0, min(pause, remaining)))
            now = clock.now()
            late = next((call for call in self._waiting if now >= call.deadline), None)
        if late is None:
            return True
        expected = f"{self.name} expected to answer {late.method!r} within {late.within:.3g} s"
        self._give_up(WireError(f"{expected}, got: {problem.removesuffix('.')}."))
        return False

    def _due(self) -> float:
        return min((call.deadline for call in self._waiting), default=float("inf"))

    def _give_up(self, error: Exception) -> None:
        closed(self)
        with self._changed:
            self._failure = self._failure or error
            waiting, self._waiting = list(self._waiting), deque()
            self._sent = self._sent_bytes = 0
        for reply in waiting:
            reply.set(error)

    def _talk(self) -> None:
        """Use one connection until it breaks or is not needed any more."""
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
                welcome = connection.handshake({**self._hello(), "session": self._session, **times})
            except RefusedError as error:
                raise RefusedError(f"{self.name} refused: {error}.") from error
            self._accept_welcome(welcome)
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

    def _accept_welcome(self, welcome: dict[str, Any]) -> None:
        if welcome.get("error") == BusyError.__name__:
            raise BusyError(f"{self.name} is busy: {welcome.get('text')}")
        if "error" in welcome:
            refused = RefusedError(f"{self.name} refused: {welcome.get('text')}")
            raise _marked(refused, welcome)
        incarnation, last = welcome.get("incarnation"), welcome.get("last")
        if not isinstance(incarnation, str) or type(last) is not int:
            raise RefusedError(f"{self.name} expected to be a service of Karvan, got something else.")
        with self._changed:
            restarted = incarnation != self.welcome.get("incarnation", incarnation)
            forgotten = restarted or last < self._answered
            unsure = self._numbered > (0 if restarted else self._answered)
            if forgotten and unsure and not self._forgetful:
                raise PeerLostError(f"{self.name} has restarted: what it held is lost.")
            if forgotten:
                self._answered = self._numbered = 0  # the service counts from 1 again
                if self._on_restart is not None and unsure:
                    first = [self._first(*call) for call in self._on_restart(incarnation)]
                    self._waiting.extendleft(reversed(first))
            self.welcome = welcome
            self._sent = self._sent_bytes = 0
            self._heard = clock.now()
            self.connections += 1

    def _first(self, call: Declared[A], head: Sent) -> Reply[A]:
        """A call that nobody waits for; if it fails, the client gives up."""
        reply = Reply(self, call, head, (), self._deadline)
        reply._then = lambda answered: self._give_up(answered.error) if answered.error else None
        return reply

    def _send(self, connection: FlightConnection) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._broken or self._closing or self._sent < len(self._waiting)
                )
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
            # The service holds this caller's session for that long after a connection broke.
            longer = {"within": math.ceil(min(reply.within, 2**31))} if reply.within > self._deadline else {}
            connection.write(call, number=number, received=received, **longer)
            self.bytes_sent += reply.bytes
        with contextlib.suppress(pa.ArrowException, OSError):
            connection.write(pack(Message({"method": "bye"})))
            with self._changed:  # the service ends the connection once it has read that, after its calls
                self._changed.wait_for(lambda: self._broken is not None, 0.05 if self._sent else _GOODBYE)

    def _why(self, error: Exception) -> Exception:
        """Why a write failed: the other threads know more, such as the last message of the service."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None, 0.5)
            return self._broken or error

    def _watch(self, connection: FlightConnection, over: threading.Event, welcome_by: float) -> None:
        """Cancel a connection whose service takes too long."""
        before = self.connections
        while not over.wait(min(0.5, self._patience / 4)):
            with self._changed:
                now = clock.now()
                problem = self._overdue(now)
                if self.connections == before and (now > welcome_by or self._closing):
                    problem = "no answer to hello"
                if problem and self._broken is None:
                    self._broken = WireError(problem)
                    self._changed.notify_all()
            if problem:
                connection.cancel()

    def _overdue(self, now: float) -> str:
        if self._closing:
            return "the connection was closed" if now > self._closing + _GOODBYE else ""
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
                    ended = isinstance(error, StopIteration)
                    self._broken = WireError("the service ended the connection") if ended else error
                self._changed.notify_all()

    def _take(self, answer: Message) -> None:
        with self._changed:
            self._heard = clock.now()
            if "busy" in answer.head:
                self._heard += answer.head.get("bytes", 0) / _SLOWEST
                return
            if answer.head.get("fatal"):
                refusal = BusyError if answer.head.get("error") == BusyError.__name__ else RefusedError
                raise refusal(f"{self.name} refused: {answer.head.get('text')}")
            if not self._sent or answer.head.get("number") != self._answered + 1:
                raise RefusedError(f"{self.name} sent an answer without a call.")
            reply = self._waiting.popleft()
            self._sent -= 1
            self._sent_bytes -= reply.bytes
            self._answered += 1
            self.bytes_received += answer.bytes
        if "error" in answer.head:
            kind = REPORTED_ERRORS.get(str(answer.head["error"]), RuntimeError)
            text, cause = f"{self.name}: {answer.head.get('text')}", answer.head.get("errno")
            error = kind(cause, text) if kind is OSError and isinstance(cause, int) else kind(text)
            reply.set(_marked(error, answer.head))
        else:
            reply.answer(answer)


class LastingClient:
    """A forgetful `Client` of a service, and another one after it once it has given up.

    One that was closed because the process ends has no successor.
    """

    def __init__(
        self, name: str, find: str | Callable[[], str], security: Security | None = None, **settings: Any
    ) -> None:
        self._connect = partial(Client, name, find, security, forgetful=True, **settings)
        self._lock = threading.Lock()
        self._client: Client | None = None

    def current(self) -> Client:
        """The client for the next call."""
        with self._lock:
            if self._client is None or self._client.failed:
                self._client = self._connect()
            return self._client

    def close(self) -> None:
        """Disconnect, until the next call."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def _marked(error: Exception, head: Mapping[str, Any]) -> Exception:
    """The error of a service, marked with whether it is temporary if the service has said so."""
    temporary = head.get("temporary")
    return mark(error, temporary) if isinstance(temporary, bool) else error


def _copy_of(error: Exception) -> Exception:
    """A copy for each thread that raises it: a traceback belongs to one thread."""
    try:
        copy = type(error)(*error.args)
    except Exception:  # its class has other arguments
        return error
    copy.__dict__.update(error.__dict__)
    return copy
