"""`Server`: a service at a port, or at a socket file.

A caller has two streams, and so two threads here. One reads its calls and executes them in order; the answers
go to the other stream, whose thread otherwise only reports from time to time that a call is still running.
There are two streams because a caller reads and writes at the same time, which Flight allows on one stream
except at its end, when a write in progress would crash the caller's process.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import time
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.flight as flight

from karvan.activity import activity
from karvan.clock import clock
from karvan.job.address import binding, join_address, location, shut_connections
from karvan.process_end import PreparedThread
from karvan.wire.admission import Admission, Limits
from karvan.wire.errors import BusyError, ListenError, PeerLostError, RefusedError, WireError
from karvan.wire.exit_hooks import close_at_exit, closed, finish_at_exit
from karvan.wire.message import MOST_BYTES, SCHEMA, Message, Packed, pack, read, write
from karvan.wire.schema.calls import hello_fields
from karvan.wire.security.credentials import Security
from karvan.wire.server_connection import BUSY_EVERY, ServerConnection
from karvan.wire.service import Caller, Service
from karvan.wire.session import Sessions

_log = logging.getLogger("karvan.wire")

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
        self.admission = Admission(service.name, limits)
        self.most_bytes = most_bytes
        self.connections: dict[str, ServerConnection] = {}
        self._closed = False
        self._process = os.getpid()
        try:
            with binding(host):
                at = location(host, port, security.tls)
                self._flight = _Flight(self, at, security.server_options(self.admission))
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
        except BusyError as error:
            write(writer, pack(_refusal(error)))
            raise
        except (pa.ArrowException, OSError):
            raise
        except Exception as error:
            if not isinstance(error, RefusedError):
                server.service.note_failure(error)
                _log.exception("%s could not welcome %s", self._name, where)
            write(writer, pack(_refusal(error)))
            if isinstance(error, RefusedError):
                raise

    def _accompany(self, context: Any, connection: ServerConnection) -> None:
        """While another thread executes the calls, report to the caller that they are running."""
        every = max(0.05, min(BUSY_EVERY, connection.patience / 4))
        while not connection.ended.wait(every) and not context.is_cancelled():
            connection.say_if_busy(every)
            problem = connection.overdue(clock.now(), self._server.admission.limits)
            if problem:
                raise RefusedError(problem)

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
            raise RefusedError("expected a call with its number and that of the last answer received.")
        service, most = self._server.service, self._server.most_bytes

        def do() -> Packed:
            try:
                if call.head.get("method") == "ping":
                    return pack(Message({"service": service.name}))
                return pack(service.answer(call, connection.caller), most)
            except Exception as error:
                service.note_failure(error)
                kind, cause = type(error).__name__, None
                if isinstance(error, MemoryError):
                    kind = "MemoryError"
                if kind not in REPORTED_ERRORS and isinstance(error, OSError):
                    kind = "OSError"
                if kind not in REPORTED_ERRORS:
                    # Karvan's own errors, which know whether they are temporary, need no traceback.
                    stack = getattr(error, "temporary", None) is None
                    at = call.head.get("method")
                    _log.error("%s failed at %r: %s", service.name, at, _text(error), exc_info=stack)
                    kind = "RuntimeError"
                if kind == "OSError":  # its number decides whether the caller tries again
                    cause = getattr(error, "errno", None)
                failure = {"error": kind, "text": _text(error), "errno": cause}
                return pack(Message({**failure, "temporary": getattr(error, "temporary", None)}))

        answer = connection.session.answer(number, received, do, within if type(within) is int else 0)
        if service.progresses:
            activity.advance()
        return answer, number


def _do_not_wait_at_exit(server: _Flight) -> None:
    """At the end of the program Flight would wait forever for callers that hold streams open."""
    for each in gc.get_referents(server):
        if isinstance(each, weakref.finalize):
            each.atexit = False


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
    temporary = getattr(error, "temporary", None)
    return Message({"error": kind.__name__, "text": _text(error), "fatal": True, "temporary": temporary})


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" at {error.filename}" if error.filename else "")
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
