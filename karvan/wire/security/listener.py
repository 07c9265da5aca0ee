"""Checks who listens at a local port before a token is sent there.

A service without TLS cannot prove its identity. Any user may take a free port: when a service has died,
another user of the machine could listen there and receive the token from callers that reconnect. Linux
reports the owner of every listening socket, so a caller with a token checks first, and sends it only to
services of its own user and of root. A listener of another user is an error like a port at which nobody
listens: the caller tries again until its deadline, since the service may come back, at this address or
another.

There is a short time between the check and the connection; TLS closes that gap. The kernel is asked over
netlink (sock_diag), which takes less than a tenth of a millisecond, or, where that is not allowed, by reading
/proc/net. On systems that have neither, nothing is checked.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import TypeAlias

from karvan.wire.errors import WireError

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Listener: TypeAlias = tuple[_Address, int]  # and the uid of its owner

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")  # bytes, kind, flags, number, port
_REQUEST = struct.Struct("=BBBBI48sQ")  # family, protocol, extensions, padding, states, socket, cookie
_PORT, _SOURCE, _UID = 20, 24, 80  # their offsets in an answer
_TCP, _LISTEN = 6, 10


def check_listener(host: str, port: int) -> None:
    """A WireError if nobody, or another user, listens at a loopback address."""
    try:
        listeners = _ask_kernel(port)
    except OSError:
        try:
            listeners = _read_tables(port)
        except OSError:
            return
    resolved = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    owners = [uid for address in resolved for uid in _reached(ipaddress.ip_address(address), listeners)]
    if not owners:
        raise WireError(f"nobody listens at {host}:{port}")
    strangers = [uid for uid in owners if uid not in (0, os.geteuid())]
    if strangers:
        raise WireError(
            f"expected a service of this user (uid {os.geteuid()}) at {host}:{port}, got one of uid "
            f"{strangers[0]}, to which the job's token is not sent; TLS allows services of other users"
        )


def _reached(address: _Address, listeners: list[_Listener]) -> list[int]:
    """The owners of the sockets that the kernel may connect a caller to: those with the closest match.

    So a listener at another address with the same port does not count.
    """
    for matches in (
        [uid for there, uid in listeners if there == address],
        [uid for there, uid in listeners if there.is_unspecified and there.version == address.version],
        [uid for there, uid in listeners if there.is_unspecified and address.version == 4],
    ):
        if matches:
            return matches
    return []


def _ask_kernel(port: int) -> list[_Listener]:
    """The listeners at this port; an OSError if the kernel does not answer."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("no netlink")
    found: list[_Listener] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(5.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _REQUEST.pack(family, _TCP, 0, 0, 1 << _LISTEN, struct.pack("!H", port), 2**64 - 1)
            size = _HEADER.size + len(request)
            kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
            while _take_answers(kernel.recv(1 << 16), port, found):
                pass
    return found


def _take_answers(data: bytes, port: int, found: list[_Listener]) -> bool:
    """Add the sockets of a part of an answer to `found`; returns whether there are more parts."""
    while data:
        size, kind = _HEADER.unpack_from(data)[:2]
        if kind == _DONE:
            return False
        if kind == _ERROR or size < _UID + 4:
            raise OSError("sock_diag was refused")
        if struct.unpack_from("!H", data, _PORT)[0] == port:
            length = 4 if data[_HEADER.size] == socket.AF_INET else 16
            address = _unmapped(data[_SOURCE : _SOURCE + length])
            found.append((address, struct.unpack_from("=I", data, _UID)[0]))
        data = data[(size + 3) & ~3 :]
    return True


def _read_tables(port: int) -> list[_Listener]:
    """The same from /proc/net; an OSError if it does not exist."""
    found: list[_Listener] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if table.endswith("6") and not Path(table).exists():
            continue  # a machine without IPv6
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, _, text = fields[1].partition(":")
            if int(fields[3], 16) == _LISTEN and int(text, 16) == port:
                # Words of 32 bits, each in this machine's byte order.
                words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
                found.append((_unmapped(struct.pack(f"={len(words)}I", *words)), int(fields[7])))
    return found


def _unmapped(packed: bytes) -> _Address:
    if len(packed) == 4:
        return ipaddress.IPv4Address(packed)
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address
