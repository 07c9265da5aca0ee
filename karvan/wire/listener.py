"""Who listens at a port of this machine, asked before a token is shown there.

A service without TLS cannot prove that it is one. Its port belongs to whoever takes it: when a service has
died, another user of the machine could listen there and be shown the token by callers that connect again.
Linux tells whose every listening socket is, so a caller with a token looks first, and shows it to services of
its own user and of root only. Anybody else's is an error like a port at which nobody listens: the caller
tries again until its deadline, since the service may come back, here or elsewhere.

A moment lies between looking and connecting; TLS has no such moment. On systems without /proc/net there is
nothing to look at, and nothing is checked.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from karvan.wire.errors import WireError

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN = "0A"


def check_listener(host: str, port: int) -> None:
    """A WireError if nobody, or another user, listens at a loopback address."""
    addresses = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    owners = [
        owner
        for listening, owner in _listeners(port)
        if listening.is_unspecified or str(listening) in addresses
    ]
    if not owners and Path(_TABLES[0]).exists():
        raise WireError(f"nobody listens at {host}:{port}")
    strangers = [owner for owner in owners if owner not in (0, os.geteuid())]
    if strangers:
        raise WireError(
            f"expected a service of this user (uid {os.geteuid()}) at {host}:{port}, got one of uid "
            f"{strangers[0]}, to which the job's token is not shown; TLS allows services of other users"
        )


def _listeners(port: int) -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Addresses at which somebody listens at this port, each with the uid of its owner."""
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, found = fields[1].partition(":")
            if fields[3] == _LISTEN and int(found, 16) == port:
                yield _parsed(address), int(fields[7])


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of 32 bits, each in this machine's order of bytes."""
    words = [int(text[place : place + 8], 16) for place in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return ipaddress.IPv4Address(packed)
    made = ipaddress.IPv6Address(packed)
    return made.ipv4_mapped or made
