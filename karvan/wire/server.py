"""`Server`: a service at a port, or at a socket file.

A caller has two streams, and so two threads here. One reads its calls and executes them in order; the answers
go to the other stream, whose thread otherwise only reports from time to time that a call is still running.
There are two streams because a caller reads and writes at the same time, which Flight allows on one stream
except at its end, when a write in progress would crash the caller's process.
"""

from __future__ import annotations

import gc
import hmac
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.flight as flight
from typing_extensions import TypeVar

from karvan.activity import activity
from karvan.clock import clock
from karvan.errors import BusyError, ListenError, PeerLostError, RefusedError, WireError, is_exhausted
from karvan.job.address import binding, join_address, location, shut_connections
from karvan.process_end import PreparedThread, close_at_exit, closed, finish_at_exit
from karvan.wire.message import LARGE, MOST_BYTES, SCHEMA, Array, Message, Packed, pack, read, write
from karvan.wire.schema import Call, CallTable, Fields, Kind, hello_fields, shown
from karvan.wire.security import HEADER, NO_TOKEN, Security

# `Service`: the base of all services that answer calls.
#
# A service declares which calls it accepts (`karvan.wire.schema`) and which of its methods executes
# each. `Service.answer` looks a call up, checks its head and arrays against the declaration, and only then
# calls the method: anything unknown, missing, or of another type, dtype, shape or size is refused with what
# was expected and received, and changes nothing. A hello is checked in the same way, before `welcome`.


class Caller(NamedTuple):
    """Who calls: the name of its session, and its checked hello."""

    session: str
    hello: Any


H = TypeVar("H", default=Any)


class Request(NamedTuple, Generic[H]):
    """A call that matches its declaration, for the method that executes it."""

    head: H
    arrays: Sequence[Array]
    caller: Caller


class Endpoint(NamedTuple, Generic[H]):
    """A declared call and the method that executes it; None stands for an empty answer."""

    call: Call[H, Any]
    method: Callable[[Request[H]], Message[Any] | None]


def endpoints(calls: CallTable, *methods: Endpoint[Any]) -> dict[str, Endpoint[Any]]:
    """The method of each declared call by its name; one too many or too few is a ValueError."""
    by_name = {endpoint.call.name: endpoint for endpoint in methods}
    if set(calls) != set(by_name) or len(by_name) != len(methods):
        odd = ", ".join(sorted(set(calls) ^ set(by_name)))
        raise ValueError(f"Expected one method for each declared call, got another set: {odd}.")
    return by_name


class Service:
    """Answers the calls of a server; its methods run on one thread per caller.

    hello: the fields of a caller's hello. endpoints: set by the service; see `endpoints`. progresses:
    whether an answered call counts as progress (`karvan.activity`); some services may answer "wait".
    on_exhaustion: called with an error that says that this process has no memory or disk to go on; a process
    that is there for its service ends then, before a caller could take the error for its own.
    """

    name = "service"
    hello: ClassVar[Kind[Any]] = Fields({})
    endpoints: Mapping[str, Endpoint[Any]] = {}
    progresses = True
    on_exhaustion: Callable[[BaseException], object] | None = None

    def note_failure(self, error: BaseException) -> None:
        """Something failed in the service, in a call or behind it."""
        if self.on_exhaustion is not None and is_exhausted(error):
            self.on_exhaustion(error)

    def welcome(self, caller: Caller) -> dict[str, Any]:
        """A caller connects, for the first time or again; returns what it should know. May refuse."""
        return {}

    def admit(self, caller: Caller) -> None:
        """Before each call: refuse callers that may not call any more, such as those of an older run."""

    @final
    def answer(self, call: Message, caller: Caller) -> Message[Any]:
        """Execute the call that `call.head["method"]` names; the server answers "ping" for all services."""
        method = call.head.get("method")
        endpoint = self.endpoints.get(method) if isinstance(method, str) else None
        if endpoint is None:
            names = ", ".join(sorted(self.endpoints)) or "none"
            raise RefusedError(
                f"{self.name} does not know the call {shown(method)}; expected one of {names}."
            )
        self.admit(caller)
        return endpoint.method(Request(endpoint.call.check(call), call.arrays, caller)) or Message({})

    def close(self) -> None:
        """Release resources; called by the owner of the service, after the server has ended."""


# The calls of one client at a service, each executed once.
#
# Calls are numbered. A connection may break between a call and its answer; the caller then repeats the calls
# that have not been answered, and gets the stored answers of those that were executed. Answers are stored
# until the caller confirms that it has received them.
#
# A caller that is killed does not say good-bye, so sessions without a connection accumulate. How long one
# must be retained follows from what the caller can still ask: it repeats a call until the call's deadline
# and no longer, so a session is needed for that many seconds after its connection broke (callers say how
# many). A session in which no call was ever started has no answers to repeat, and is removed with its
# connection. One that has not reached its deadline is never removed to make room; a new caller is then
# refused as "busy", and tries again.


USUAL_DEADLINE = 120.0  # seconds, of callers that do not say
LONGEST_DEADLINE = 3600.0  # the session of a caller that is disconnected for longer may be removed
_MARGIN = 10.0  # seconds, between the clocks of the two sides
_SCAN_EVERY = 1.0  # seconds, at least, between two scans of all sessions
_MOST_BYTES = 2**28  # of answers stored for disconnected callers; more of them count as pressure


class Session:
    """A service's state of one caller; connections of the same caller take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, Packed] = {}
        self.deadline = USUAL_DEADLINE
        self.started = 0  # number of the last call that was started
        self.last = 0  # number of the last call that was completed
        self.connections = 0
        self.used = clock.now()

    @property
    def bytes(self) -> int:
        """The size of the stored answers."""
        return sum(array.nbytes for packed in list(self._answers.values()) for array in packed.arrays)

    def answer(self, number: int, received: int, do: Callable[[], Packed], deadline: float = 0.0) -> Packed:
        """The answer to a call; the caller has those up to `received`, and waits for `deadline` seconds."""
        with self._lock:
            self.used = clock.now()
            self.deadline = max(self.deadline, min(deadline, LONGEST_DEADLINE))
            for old in [number for number in self._answers if number <= received]:
                del self._answers[old]
            if number in self._answers:
                return self._answers[number]
            if number != self.last + 1:
                raise RefusedError(f"expected call {self.last + 1} of this caller, got {number}.")
            self.started = number
            answer = do()
            self.last = number
            self._answers[number] = answer
            return answer

    def expired(self, now: float, idle: float, pressure: bool) -> bool:
        """Whether its disconnected caller cannot ask for an answer any more, or has been idle for `idle`."""
        return now - self.used > (min(idle, self.deadline + _MARGIN) if pressure else idle)


class Sessions:
    """The sessions of all callers of a service by name; those that are disconnected for long are removed."""

    def __init__(self, most: int = 65536, idle: float = 3600.0) -> None:
        self._most = most
        self._idle = idle
        self._lock = threading.Lock()
        self._known: dict[str, Session] = {}
        self._scanned = 0.0  # when the disconnected sessions were last scanned

    @contextmanager
    def use(self, name: str, deadline: float = USUAL_DEADLINE) -> Iterator[Session]:
        """The session of that name, created if necessary, for one connection."""
        with self._lock:
            if name not in self._known:
                self._make_room()
                self._known[name] = Session()
            session = self._known[name]
            session.deadline = max(1.0, min(deadline, LONGEST_DEADLINE))
            session.connections += 1
        try:
            yield session
        finally:
            with self._lock:
                session.connections -= 1
                session.used = clock.now()
                if not (session.connections or session.started) and self._known.get(name) is session:
                    del self._known[name]

    def end(self, name: str) -> None:
        """The caller has said good-bye."""
        with self._lock:
            self._known.pop(name, None)

    def _make_room(self) -> None:
        """Remove sessions that are disconnected for too long; a BusyError if that leaves no room."""
        now = clock.now()
        if now - self._scanned > _SCAN_EVERY:
            self._scanned = now
            disconnected = [(name, client) for name, client in self._known.items() if not client.connections]
            stored = sum(client.bytes for _, client in disconnected)
            pressure = len(self._known) >= self._most // 2 or stored > _MOST_BYTES
            for name in [name for name, client in disconnected if client.expired(now, self._idle, pressure)]:
                del self._known[name]
        if len(self._known) >= self._most:
            raise BusyError(
                f"expected up to {self._most} sessions, got one more; those without a connection are removed "
                "after their deadline"
            )


# `CallAdmission`: how much of a service its callers may use, and a log of those that it refuses.
#
# A caller's connection has two threads at a service. `Limits` are far above what a job needs (sixty-four
# trainers with four connections each have 256) and far below what overloads a machine. At a limit no caller
# is refused permanently: the connection that was idle for longest is ended first, and its caller reconnects
# by itself at its next call; if none is idle, the new caller gets a `BusyError`, and tries again until its
# deadline. Callers without the token, and without a certificate, do not come so far.


_log = logging.getLogger("karvan.wire")

_LINES = 20  # of the log a minute, about refused callers
_MINUTE = 60.0


@dataclass(frozen=True)
class Limits:
    """What a `Server` allows. Times are seconds."""

    connections: int = 2048
    streams: int = 5120  # with those that are just beginning
    hello_within: float = 10.0  # a connection without its second stream is ended
    first_call_within: float = 180.0  # a first call may be large and the network slow
    least_idle: float = 5.0  # a connection that was used within this time is not ended to make room
    sessions: int = 65536


class CallAdmission:
    """The callers of one service."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.limits = limits
        self._name = name
        self._lock = threading.Lock()
        self._open: set[ServerConnection] = set()
        self._streams = 0
        self._refusals = 0  # in this minute
        self._minute = clock.now()

    def stream_opened(self) -> None:
        """Count a stream with the right token; a BusyError if there are too many."""
        with self._lock:
            if self._streams >= self.limits.streams:
                raise BusyError(f"expected up to {self.limits.streams} streams, got one more")
            self._streams += 1

    def stream_ended(self) -> None:
        """It has ended."""
        with self._lock:
            self._streams -= 1

    @contextmanager
    def admitted(self, connection: ServerConnection) -> Iterator[None]:
        """Room for a caller's connection, for as long as it lasts; a BusyError if there is none."""
        with self._lock:
            if len(self._open) >= self.limits.connections:
                self._end_idle()
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def refused(self, caller: str, reason: str) -> None:
        """Log a refusal, unless there were many in this minute; then their number is logged after it."""
        with self._lock:
            more = 0
            if clock.now() - self._minute >= _MINUTE:
                more, self._refusals = self._refusals - _LINES, 0
                self._minute = clock.now()
            self._refusals += 1
            is_shown = self._refusals <= _LINES
        if more > 0:
            _log.warning("%s refused %d more callers", self._name, more)
        if is_shown:
            _log.warning("%s refused %s: %s", self._name, caller, reason)

    def _end_idle(self) -> None:
        """End the connection that was idle for longest; those that never made a call first."""
        now = clock.now()
        ready = [connection for connection in self._open if connection.idle(now) >= self.limits.least_idle]
        longest = max(ready, key=lambda connection: (connection.unused, connection.idle(now)), default=None)
        if longest is None:
            most = self.limits.connections
            raise BusyError(f"expected up to {most} connections, got one more; all are in use")
        self._open.discard(longest)
        longest.end()


class _CheckToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses a stream before anything is read from it."""

    def __init__(self, token: str, admission: CallAdmission) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode() if token else b""
        self._admission = admission

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> _OpenStream:
        if self._expected:
            tokens = next((values for name, values in headers.items() if name.lower() == HEADER), [])
            received = tokens[0] if len(tokens) == 1 else b""
            received = received.encode() if isinstance(received, str) else received
            if not hmac.compare_digest(received, self._expected):
                self._admission.refused("a caller", NO_TOKEN)
                raise flight.FlightUnauthenticatedError(NO_TOKEN)
        try:
            self._admission.stream_opened()
        except BusyError as error:
            raise flight.FlightUnavailableError(str(error)) from error
        return _OpenStream(self._admission)


class _OpenStream(flight.ServerMiddleware):  # type: ignore[misc]
    """A stream with the right token, until it ends."""

    def __init__(self, admission: CallAdmission) -> None:
        super().__init__()
        self._admission = admission

    def call_completed(self, exception: BaseException | None) -> None:
        """Flight says that the stream has ended."""
        self._admission.stream_ended()


# `ServerConnection`: a caller's two streams, as the service sees them.


BUSY_EVERY = 2.0  # seconds between heartbeats while a call takes long, or less for impatient callers


class ServerConnection:
    """A caller's stream of answers, and how its connection is used."""

    def __init__(self, caller: Caller, hello: Mapping[str, Any], writer: Any) -> None:
        def seconds(name: str, usual: float) -> float:
            value: Any = hello.get(name)  # of the wire itself, so nothing has checked it
            return float(value) if type(value) in (int, float) and 0 < value < 1e9 else usual

        self.caller = caller
        # Seconds of silence after which the connection counts as broken, and for which a call is repeated.
        self.patience = seconds("patience", 4 * BUSY_EVERY)
        self.deadline = seconds("deadline", USUAL_DEADLINE)
        self.session = Session()  # replaced by the caller's own once it is admitted
        self.ended = threading.Event()
        self.taken = False  # whether a thread reads its calls
        self._writer: Any = writer
        self._lock = threading.Lock()
        self._since = 0.0  # when the running call started; 0: none is running
        self._opened = self._used = clock.now()
        self._calls = 0

    @property
    def unused(self) -> bool:
        """Whether it has not made a call."""
        return not self._calls

    def idle(self, now: float) -> float:
        """Seconds without a call; 0 while one is running."""
        return 0.0 if self._since else now - self._used

    def overdue(self, now: float, limits: Limits) -> str:
        """What the caller should have done by now; empty if nothing is overdue."""
        age = now - self._opened
        if not self.taken and age > limits.hello_within:
            return f"expected a stream of calls within {limits.hello_within:g} s, got none"
        if not self._calls and age > limits.first_call_within:
            return f"expected a call within {limits.first_call_within:g} s, got none"
        return ""

    def write(self, packed: Packed, **numbers: int) -> None:
        """Send an answer."""
        with self._lock:
            if self._writer is None:
                raise WireError("the caller ended the connection")
            size = sum(array.nbytes for array in packed.arrays)
            if size > LARGE:  # announce the size, so that the caller waits long enough
                write(self._writer, pack(Message({"busy": True})), bytes=size)
            write(self._writer, packed, **numbers)

    def end(self) -> None:
        """End the stream of answers, and with it the connection."""
        self.ended.set()

    def close(self) -> None:
        """No more writes: the stream is about to end."""
        with self._lock:
            self._writer = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a call is running."""
        self._calls += 1
        self._since = clock.now()
        try:
            yield
        finally:
            self._used = clock.now()
            self._since = 0.0

    def say_if_busy(self, every: float) -> None:
        """Report to the caller that its call is still running."""
        since = self._since
        if since and clock.now() - since >= every / 2 and self._lock.acquire(blocking=False):
            try:
                write(self._writer, pack(Message({"busy": True})))
            finally:
                self._lock.release()


# Errors of a service that its caller gets with the same class; others become a RuntimeError.
REPORTED_ERRORS = {
    error.__name__: error
    for error in (
        *(ValueError, KeyError, TypeError, RuntimeError, OSError, MemoryError),
        *(RefusedError, WireError, PeerLostError),
    )
}


class Server:
    """A service at a port of this machine, or at the host "unix:/PATH", until `close`."""

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        *,
        most_bytes: int = MOST_BYTES,
        limits: Limits | None = None,
    ) -> None:
        security = (security or Security()).at(host)
        security.check_host(host)
        if security.ca and not security.cert:
            raise ValueError("A service with TLS expects a certificate and its key, got an authority alone.")
        self.service = service
        self.incarnation = secrets.token_hex(8)
        limits = limits or Limits()
        self.sessions = Sessions(limits.sessions)
        self.admission = CallAdmission(service.name, limits)
        self.most_bytes = most_bytes
        self.connections: dict[str, ServerConnection] = {}
        self._closed = False
        self._process = os.getpid()
        try:
            with binding(host):
                at = location(host, port, security.tls)
                token = {"karvan-token": _CheckToken(security.token, self.admission)}
                self._flight = _Flight(self, at, {"middleware": token, **security.server_options()})
        except (OSError, pa.ArrowException) as error:
            expected = f"{service.name} expected to listen at {join_address(host, port)}"
            raise ListenError(f"{expected}, got: {_text(error).partition(chr(10))[0][:200]}") from error
        self.address = join_address(host, self._flight.port)
        self._host = host
        self._ending = PreparedThread(self._flight.shutdown, "karvan-shutdown")
        close_at_exit(listener=self)

    def close(self, grace: float = 2.0) -> None:
        """Accept no more calls; wait up to `grace` seconds for callers that hold their streams open."""
        if os.getpid() != self._process:  # in a fork: it belongs to the parent, as its socket file does
            _do_not_wait_at_exit(self._flight)
            return
        if self._closed:
            return
        self._closed = True
        closed(listener=self)
        ending = self._ending
        ending.begin()
        due = time.monotonic() + grace
        while ending.is_alive() and time.monotonic() < due:
            for connection in list(self.connections.values()):  # also those that were just opened
                connection.end()
            if time.monotonic() > due - grace / 2:
                # Streams that are still open afterwards end on threads of gRPC that call Python: if the
                # program ends in the meantime, they crash it.
                shut_connections(self._host, self._flight.port)
            ending.join(0.05)
        if ending.is_alive():
            _do_not_wait_at_exit(self._flight)
            finish_at_exit(ending)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Flight(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, server: Server, location: str, options: Mapping[str, Any]) -> None:
        super().__init__(location, **options)
        self._server = server
        self._name = server.service.name

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """One of a caller's streams: its first message says which one."""
        where = unquote(context.peer())
        try:
            first = read(reader.read_chunk, self._server.most_bytes).head
            if first.get("method") == "calls":
                self._calls(first, reader)
            else:
                writer.begin(SCHEMA)
                self._answers(context, where, first, writer)
        except StopIteration:
            pass
        except (RefusedError, BusyError) as error:
            self._server.admission.refused(where, str(error))
        except Exception as error:
            self._server.service.note_failure(error)
            if isinstance(error, pa.ArrowException | OSError):  # the caller is gone, or sends no Arrow
                _log.info("%s lost %s: %s", self._name, where, _first_line(error))
            else:
                _log.exception("%s failed with %s", self._name, where)

    def _answers(self, context: Any, where: str, hello: dict[str, Any], writer: Any) -> None:
        server = self._server
        try:
            caller, key = _identify(server.service, hello)
            connection = ServerConnection(caller, hello, writer)
            with server.admission.admitted(connection):
                details = server.service.welcome(caller)
                if server._closed:
                    return
                with server.sessions.use(caller.session, connection.deadline) as session:
                    connection.session = session
                    welcome = {**details, "incarnation": server.incarnation, "last": session.last}
                    server.connections[key] = connection
                    try:
                        connection.write(pack(Message(welcome)))
                        self._accompany(context, connection)
                    finally:
                        server.connections.pop(key, None)
                        connection.close()
        except (BusyError, RefusedError) as error:
            write(writer, pack(_refusal(error)))
            raise
        except (pa.ArrowException, OSError):
            raise
        except Exception as error:
            server.service.note_failure(error)
            _log.exception("%s could not welcome %s", self._name, where)
            write(writer, pack(_refusal(error)))

    def _accompany(self, context: Any, connection: ServerConnection) -> None:
        """While another thread executes the calls, report to the caller that they are running."""
        every = max(0.05, min(BUSY_EVERY, connection.patience / 4))
        while not connection.ended.wait(every) and not context.is_cancelled():
            connection.say_if_busy(every)
            problem = connection.overdue(clock.now(), self._server.admission.limits)
            if problem:  # it may be slow, not idle: it connects again if it has calls
                raise BusyError(problem)

    def _calls(self, first: dict[str, Any], reader: Any) -> None:
        connection = self._server.connections.get(str(first.get("connection")))
        if connection is None or connection.taken:
            raise RefusedError("expected calls of a caller that has said hello.")
        connection.taken = True
        try:
            while True:
                call = read(reader.read_chunk, self._server.most_bytes)
                if call.head.get("method") == "bye":
                    self._server.sessions.end(connection.caller.session)
                    return
                with connection.working():
                    answer, number = self._answer(call, connection)
                connection.write(answer, number=number)
        except RefusedError as error:
            connection.write(pack(_refusal(error)))
            raise
        finally:
            connection.ended.set()

    def _answer(self, call: Message, connection: ServerConnection) -> tuple[Packed, int]:
        number, received = call.head.get("number"), call.head.get("received")
        within = call.head.get("within")  # seconds, if more than the deadline in the caller's hello
        if type(number) is not int or type(received) is not int:
            raise RefusedError("expected a call with its number and the number of the last answer received.")
        service, most = self._server.service, self._server.most_bytes

        def do() -> Packed:
            try:
                if call.head.get("method") == "ping":
                    return pack(Message({"service": service.name}))
                return pack(service.answer(call, connection.caller), most)
            except Exception as error:
                service.note_failure(error)
                kinds = [type(error), *(kind for kind in (MemoryError, OSError) if isinstance(error, kind))]
                reported = [kind.__name__ for kind in kinds if kind.__name__ in REPORTED_ERRORS]
                if not reported:
                    # Karvan's own errors, which know whether they are temporary, need no traceback.
                    stack = getattr(error, "temporary", None) is None
                    at = call.head.get("method")
                    _log.error("%s failed at %r: %s", service.name, at, _text(error), exc_info=stack)
                kind = reported[0] if reported else "RuntimeError"
                # The number of an OSError decides whether the caller tries again.
                return pack(
                    _failure(error, kind, errno=getattr(error, "errno", None) if kind == "OSError" else None)
                )

        answer = connection.session.answer(number, received, do, within if type(within) is int else 0)
        if service.progresses:
            activity.advance()
        return answer, number


def _do_not_wait_at_exit(server: _Flight) -> None:
    """At the end of the program Flight would wait forever for callers that hold streams open."""
    for item in gc.get_referents(server):
        if isinstance(item, weakref.finalize):
            item.atexit = False


def _identify(service: Service, hello: dict[str, Any]) -> tuple[Caller, str]:
    name, connection = hello.get("session"), hello.get("connection")
    if hello.get("method") != "hello" or not _is_name(name) or not _is_name(connection):
        raise RefusedError("expected hello and the names of a session and a connection as the first message.")
    fields = service.hello.check(hello_fields(hello), "the hello")
    return Caller(str(name), fields), str(connection)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _refusal(error: Exception) -> Message:
    kind = BusyError if isinstance(error, BusyError) else RefusedError
    return _failure(error, kind.__name__, fatal=True)


def _failure(error: Exception, kind: str, **more: Any) -> Message:
    temporary = getattr(error, "temporary", None)
    return Message({"error": kind, "text": _text(error), **more, "temporary": temporary})


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" at {error.filename}" if error.filename else "")
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
