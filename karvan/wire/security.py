"""Who may call: a job's token, its file, and the certificates of TLS."""

from __future__ import annotations

import logging
import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from karvan.job.address import UNIX, check_private, is_loopback
from karvan.job.environment import JobEnvironment
from karvan.system_limits import forbid_core_dumps

# The file that holds a job's token: read once, and checked when it is read.
#
# A token is sent in an HTTP/2 header. One that is not valid there would fail much later, at the first call,
# with an error of gRPC that names neither the file nor the mistake; one that others may read is no secret.
# Error messages and logs never contain any part of a token.


_log = logging.getLogger("karvan.wire")

MOST_CHARACTERS = 4096
LEAST_CHARACTERS = 16  # fewer can be guessed; a warning
RECIPE = "`openssl rand -hex 32` makes one"


def read_token(path: str | Path) -> str:
    """The token in the file that KARVAN_TOKEN_FILE names, without surrounding whitespace."""
    token, mode = token_in(path, "KARVAN_TOKEN_FILE"), stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        _log.warning(
            "The token file %s can be read or changed by other users (mode %03o); run: chmod 600 %s",
            path,
            mode,
            shlex.quote(str(path)),
        )
    if len(token) < LEAST_CHARACTERS:
        _log.warning(
            "The token in %s has %d characters; fewer than %d can be guessed (%s).",
            path,
            len(token),
            LEAST_CHARACTERS,
            RECIPE,
        )
    return token


def token_in(path: str | Path, name: str) -> str:
    """The token in a file, which may be open to others or easy to guess."""
    with Path(path).open("rb") as file:
        content = file.read(2 * MOST_CHARACTERS)  # a device or a large file must not fill memory
    return check_token(content, f"{name} expects", f"got {path}, which")


def check_token(content: bytes, expects: str, got: str) -> str:
    """The token in these bytes; a ValueError, worded with the two texts, if they hold none."""
    token = content.strip(b" \t\r\n")
    if not token:  # a job that was meant to be protected must not be open
        raise ValueError(f"{expects} a file that is not empty, {got} is empty.")
    problem = _problem(token)
    if problem:
        expected = f"one line of up to {MOST_CHARACTERS} printable ASCII characters without spaces ({RECIPE})"
        raise ValueError(f"{expects} {expected}, {got} {problem}.")
    return token.decode("ascii")


def _problem(token: bytes) -> str:
    if len(token) > MOST_CHARACTERS:
        return f"has more than {MOST_CHARACTERS}"
    if b"\n" in token or b"\r" in token:
        return "has several lines"
    position = next((at for at, byte in enumerate(token) if not 0x21 <= byte <= 0x7E), None)
    if position is None:
        return ""
    kind = "one that is not ASCII" if token[position] > 0x7E else "a space or control character"
    return f"has {kind} at position {position + 1}"


# Access to a service: a token that callers send, and TLS, which encrypts it and identifies the service.


# gRPC's own log lines repeat what our errors say, and strangers can cause any number of them, such as by an
# invalid header. It reads this when it starts.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

HEADER = "authorization"
NO_TOKEN = "expected the job's token, got none or another"


@dataclass(frozen=True)
class Security:
    """The credentials of a job's services.

    token: callers must send it. cert and key: a service's certificate and its key, in PEM; ca: the authority
    that signed them, which callers trust. mutual: callers need a certificate of that authority, too. name:
    the name in the certificates of services, if it is not the host by which they are reached.
    """

    token: str = field(default="", repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)
    mutual: bool = False
    name: str = ""

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

    def at(self, host: str) -> Security:
        """What is used at this host: TLS is for ports, a socket file has a private folder."""
        return replace(self, cert=b"", key=b"", ca=b"", mutual=False) if host.startswith(UNIX) else self

    def check_host(self, host: str) -> None:
        """Raise if a service without token and TLS would be open to other machines."""
        if host.startswith(UNIX):
            check_private(host)
        elif not is_loopback(host) and not (self.token and self.cert):
            raise ValueError(
                f"A service without TLS and a token expects a loopback address such as 127.0.0.1, got {host}."
            )

    def check_target(self, host: str) -> None:
        """Raise if a caller would send its token unencrypted to another machine."""
        if host.startswith(UNIX):
            check_private(host)
        elif self.token and not self.tls and not is_loopback(host):
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
                raise ValueError(f"{name} expects a file that is not empty, got the empty file {path}.")
            return read

        return cls(
            token=read_token(job.token_file) if job.token_file else "",
            cert=content("KARVAN_TLS_CERT", job.tls_cert),
            key=content("KARVAN_TLS_KEY", job.tls_key),
            ca=content("KARVAN_TLS_CA", job.tls_ca),
            mutual=bool(job.tls_mutual),
            name=job.tls_name,
        )

    def server_options(self) -> dict[str, Any]:
        """For a Flight server."""
        options: dict[str, Any] = {}
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
        if self.ca and self.name:
            options["override_hostname"] = self.name
        if self.mutual:
            options |= {"cert_chain": self.cert, "private_key": self.key}
        return options

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that a caller sends."""
        return [(HEADER.encode(), f"Bearer {self.token}".encode())] if self.token else []
