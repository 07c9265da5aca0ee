"""`FlightConnection`: a caller's two streams to a service, for calls and for answers (see `server.py`)."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from karvan.job.address import location, split_address
from karvan.wire.errors import RefusedError, WireError
from karvan.wire.message import SCHEMA, Message, Packed, pack, read, write
from karvan.wire.security.credentials import Security

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
        for each in (*self._writers, self._client):
            with contextlib.suppress(pa.ArrowException, OSError):
                each.close()

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
