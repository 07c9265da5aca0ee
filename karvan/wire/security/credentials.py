"""Access to a service: a token that callers send, and TLS, which encrypts it and identifies the service."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

# gRPC's own log lines about failed connections repeat what our errors say. It reads this when it starts.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import pyarrow.flight as flight

from karvan.job.environment import JobEnvironment
from karvan.job.loopback import is_loopback
from karvan.system_limits import forbid_core_dumps
from karvan.wire.errors import BusyError
from karvan.wire.security.token_file import check_token, read_token

HEADER = "authorization"
STREAMS = "karvan-streams"  # the name of the middleware that checks them


@dataclass(frozen=True)
class Security:
    """The credentials of a job's services.

    token: callers must send it. cert and key: a service's certificate and its key, in PEM; ca: the authority
    that signed them, which callers trust. mutual: callers need a certificate of that authority, too.
    """

    token: str = field(default="", repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)
    mutual: bool = False

    def __post_init__(self) -> None:
        if (
            self.token
            and check_token(self.token.encode(), "A token expects", "got a token that") != self.token
        ):
            raise ValueError("A token expects no space or line end around it, got one that has.")
        if self.token or self.key:
            forbid_core_dumps()
        if bool(self.cert) != bool(self.key):
            raise ValueError("TLS expects a certificate and its key, got one of them.")
        if self.mutual and not (self.cert and self.ca):
            raise ValueError("Mutual TLS expects a certificate, its key and an authority, got less.")

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.cert or self.ca)

    def check_host(self, host: str) -> None:
        """Raise if a service without token and TLS would be open to other machines."""
        if not is_loopback(host) and not (self.token and self.cert):
            raise ValueError(
                f"A service without TLS and a token expects a loopback address such as 127.0.0.1, got {host}."
            )

    def check_target(self, host: str) -> None:
        """Raise if a caller would send its token unencrypted to another machine."""
        if self.token and not self.tls and not is_loopback(host):
            raise ValueError(f"A token expects TLS or a service on this machine, got {host} without TLS.")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Security:
        """As KARVAN_TOKEN_FILE, KARVAN_TLS_CERT, _KEY, _CA (files) and _MUTUAL (1) say."""
        job = JobEnvironment.read(environment)

        def content(name: str, path: str) -> bytes:
            if not path:
                return b""
            read = Path(path).read_bytes()
            if not read.strip():  # a job that was meant to be protected must not be open
                raise ValueError(f"{name} expects a file with something in it, got {path}, which is empty.")
            return read

        return cls(
            token=read_token(job.token_file) if job.token_file else "",
            cert=content("KARVAN_TLS_CERT", job.tls_cert),
            key=content("KARVAN_TLS_KEY", job.tls_key),
            ca=content("KARVAN_TLS_CA", job.tls_ca),
            mutual=bool(job.tls_mutual),
        )

    def server_options(self, watch: StreamWatch) -> dict[str, Any]:
        """For a Flight server, which reports its streams to `watch`."""
        options: dict[str, Any] = {"middleware": {STREAMS: _CheckToken(self.token, watch)}}
        if self.cert:
            options["tls_certificates"] = [(self.cert, self.key)]
        if self.mutual:
            options |= {"verify_client": True, "root_certificates": self.ca}
        return options

    def client_options(self) -> dict[str, Any]:
        """For a Flight client."""
        options: dict[str, Any] = {}
        if self.ca:
            options["tls_root_certs"] = self.ca
        if self.mutual:
            options |= {"cert_chain": self.cert, "private_key": self.key}
        return options

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that a caller sends."""
        return [(HEADER.encode(), f"Bearer {self.token}".encode())] if self.token else []

    def location(self, host: str, port: int) -> str:
        """The address as a URI of Flight."""
        return f"{'grpc+tls' if self.tls else 'grpc+tcp'}://{join_address(host, port)}"


class StreamWatch(Protocol):
    """Gets reports of a service's streams before anything is read from them."""

    def token_refused(self) -> None:
        """A stream had a wrong token, or none."""

    def stream_opened(self) -> None:
        """A stream had the right one; a BusyError if there is no room for it."""

    def stream_handed_over(self) -> None:
        """It has sent its first message, or has ended."""


class _CheckToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses a stream before anything is read from it."""

    def __init__(self, token: str, watch: StreamWatch) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode() if token else b""
        self._watch = watch

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> OpenedStream:
        if self._expected:
            tokens = next((values for name, values in headers.items() if name.lower() == HEADER), [])
            received = tokens[0] if len(tokens) == 1 else b""
            received = received.encode() if isinstance(received, str) else received
            if not hmac.compare_digest(received, self._expected):
                self._watch.token_refused()
                raise flight.FlightUnauthenticatedError("expected the job's token, got none or another one")
        try:
            self._watch.stream_opened()
        except BusyError as error:
            raise flight.FlightUnavailableError(str(error)) from error
        return OpenedStream(self._watch)


class OpenedStream(flight.ServerMiddleware):  # type: ignore[misc]
    """A stream with the right token, until it is handed over or ends."""

    def __init__(self, watch: StreamWatch) -> None:
        super().__init__()
        self._watch = watch
        self._handed_over = False

    def hand_over(self) -> None:
        """Flight has received its first message and passes it to the service; or it has ended."""
        if not self._handed_over:
            self._handed_over = True
            self._watch.stream_handed_over()

    def call_completed(self, exception: BaseException | None) -> None:
        """Flight says that the stream has ended."""
        self.hand_over()


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"An address expects host:port, got {address!r}.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def reachable(address: str, advertised: str = "") -> str:
    """An address for other machines: with the advertised host, or this machine's name for 0.0.0.0 or ::."""
    host, port = split_address(address)
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    return join_address(advertised or (socket.getfqdn() if everywhere else host), port)
