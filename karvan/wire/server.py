"""`Server`: a service at a port. Each caller has a stream, and a thread that answers its calls in order."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from karvan.wire.errors import ListenError, RefusedError
from karvan.wire.message import MOST_BYTES, SCHEMA, Message, read, write
from karvan.wire.security import Security
from karvan.wire.session import Session, Sessions

_log = logging.getLogger("karvan.wire")

# Errors of a service that its caller gets as the same ones; others become a RuntimeError.
TOLD = {error.__name__: error for error in (ValueError, KeyError, TypeError, RuntimeError, RefusedError)}
BUSY_EVERY = 2.0  # seconds between signs of life while a call takes long


class Caller(NamedTuple):
    """Who calls: the name of the session, and what it said when it came."""

    session: str
    hello: Mapping[str, Any]
    address: str


class Service:
    """What a server answers with; its methods run on the threads of callers."""

    name = "service"

    def welcome(self, caller: Caller) -> dict[str, Any]:
        """Somebody connects, for the first time or again; returns what it should know. May refuse."""
        return {}

    def answer(self, call: Message, caller: Caller) -> Message:
        """Do a call: `call.head["method"]` says what; "ping" is answered for all services."""
        raise RefusedError(f"{self.name} does not know the call {call.head.get('method')!r}.")

    def close(self) -> None:
        """It is not needed any more; called by who runs it, after the server's end."""


class Server:
    """A service at a port of this machine, until `close`."""

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        *,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        security = security or Security()
        security.check_host(host)
        if security.ca and not security.cert:
            raise ValueError("A service with TLS expects a certificate and its key, got an authority alone.")
        self.service = service
        self.incarnation = secrets.token_hex(8)
        self.sessions = Sessions()
        self.most_bytes = most_bytes
        self.busy: set[_Stream] = set()
        self.open: set[_Stream] = set()
        try:
            self._flight = _Flight(self, security.location(host, port), security.server_options())
        except (OSError, pa.ArrowException) as error:
            told = _first_line(error)
            raise ListenError(f"{service.name} expected to listen at {host}:{port}, got: {told}") from error
        self.address = f"{host}:{self._flight.port}"
        self._closing = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="karvan-busy", daemon=True)
        self._ticker.start()

    def close(self, grace: float = 2.0) -> None:
        """Take no more calls; callers are asked to hang up, and waited for that long."""
        self._closing.set()
        for stream in list(self.open):
            stream.ask_to_hang_up()
        ending = threading.Thread(target=self._flight.shutdown, name="karvan-shutdown", daemon=True)
        ending.start()
        ending.join(grace)

    def _tick(self) -> None:
        """Tell callers whose call takes long that it is being done, and not lost."""
        while not self._closing.wait(BUSY_EVERY):
            for stream in list(self.busy):
                stream.still_busy()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Stream:
    """Answers on their way to a caller."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._since = 0.0
        self._over = False  # what it writes to exists no longer

    def write(self, message: Message) -> None:
        with self._lock:
            if not self._over:
                write(self._writer, message)

    def end(self) -> None:
        with self._lock:
            self._over = True

    @contextlib.contextmanager
    def working(self, among: set[_Stream]) -> Iterator[None]:
        self._since = time.monotonic()
        among.add(self)
        try:
            yield
        finally:
            among.discard(self)

    def ask_to_hang_up(self) -> None:
        # An answer that is being written may take for ever: its caller is not asked.
        if self._lock.acquire(timeout=0.1):
            try:
                with contextlib.suppress(pa.ArrowException, OSError):
                    if not self._over:
                        write(self._writer, Message({"closing": True}))
            finally:
                self._lock.release()

    def still_busy(self) -> None:
        if time.monotonic() - self._since >= BUSY_EVERY / 2:
            with contextlib.suppress(pa.ArrowException, OSError):
                self.write(Message({"busy": True}))


class _Flight(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, server: Server, location: str, options: Mapping[str, Any]) -> None:
        super().__init__(location, **options)
        self._server = server

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """A caller's stream: hello, then calls, each with its answer."""
        where = context.peer()
        writer.begin(SCHEMA)
        stream = _Stream(writer)
        self._server.open.add(stream)
        try:
            self._talk(where, reader, stream)
        except StopIteration:
            pass
        except RefusedError as error:
            _log.warning("%s refused %s: %s", self._server.service.name, where, error)
            with contextlib.suppress(pa.ArrowException, OSError):
                stream.write(Message({"error": "RefusedError", "text": str(error), "fatal": True}))
        except (pa.ArrowException, OSError) as error:  # the caller is gone, or sends what is no Arrow
            _log.info("%s lost %s: %s", self._server.service.name, where, _first_line(error))
        finally:
            self._server.open.discard(stream)
            stream.end()

    def _talk(self, where: str, reader: Any, stream: _Stream) -> None:
        server = self._server
        hello = read(reader.read_chunk, server.most_bytes).head
        name = hello.get("session")
        if hello.get("method") != "hello" or not isinstance(name, str) or not 0 < len(name) <= 200:
            raise RefusedError("expected hello and the name of a session as the first message.")
        caller = Caller(name, hello, where)
        told = server.service.welcome(caller)
        session = server.sessions.get(name)
        stream.write(Message({**told, "incarnation": server.incarnation, "last": session.last}))
        while True:
            call = read(reader.read_chunk, server.most_bytes)
            if call.head.get("method") == "bye":
                server.sessions.end(name)
                return
            stream.write(self._answer(call, caller, session, stream))

    def _answer(self, call: Message, caller: Caller, session: Session, stream: _Stream) -> Message:
        number, received = call.head.get("number"), call.head.get("received")
        if type(number) is not int or type(received) is not int:
            raise RefusedError("expected a call with its number and that of the last answer received.")

        def do() -> Message:
            service = self._server.service
            try:
                if call.head.get("method") == "ping":
                    return Message({"service": service.name, "number": number})
                with stream.working(self._server.busy):
                    made = service.answer(call, caller)
                return Message({**made.head, "number": number}, made.arrays)
            except Exception as error:
                kind = type(error).__name__
                if kind not in TOLD:
                    _log.exception("%s failed at %r", service.name, call.head.get("method"))
                    kind = "RuntimeError"
                text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
                return Message({"number": number, "error": kind, "text": text})

        return session.answer(number, received, do)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
