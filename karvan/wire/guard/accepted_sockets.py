"""`AcceptedSockets`: the TCP connections that a port of this process has accepted.

Flight neither lists them nor gives access to a stream before its first message: no address, no deadline, no
way to end it. A caller that opens a connection or a stream and sends nothing would hold a descriptor and a
thread for as long as it likes. The sockets, however, belong to this process. They are found among its
descriptors, and after a `shutdown` of one gRPC sees a caller that disconnected: all its streams end, and
their threads with them.

gRPC may close descriptors at any moment, and the kernel reuses their numbers, so each is first duplicated and
then identified. The duplicate goes to a descriptor that was reserved at the start: this must work when a
process has no more descriptors, which is when it is needed most.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import stat
import threading
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

from karvan.wire.security.credentials import join_address

_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_MOST_DESCRIPTORS = 65536  # that are tried when the folder cannot be listed
# Seconds until the kernel probes a silent caller's machine, between two probes, and the number of probes.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class AcceptedSocket(NamedTuple):
    """One connection: the caller's address, as `peer_address` writes it."""

    address: str


class AcceptedSockets:
    """The connections of one port; any thread may call its methods."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._known: dict[int, AcceptedSocket | None] = {}  # by inode; None: another kind of socket
        self._descriptors: dict[int, int] = {}  # inode → descriptor

    def look(self) -> list[AcceptedSocket]:
        """The connections that are open now."""
        with self._lock:
            if self._reserve < 0:
                return []
            descriptors = {}
            for descriptor in _descriptors():
                try:
                    status = os.fstat(descriptor)
                except OSError:  # closed in the meantime
                    continue
                if stat.S_ISSOCK(status.st_mode):
                    descriptors[status.st_ino] = descriptor
            self._descriptors = descriptors
            known = {inode: self._known.get(inode, _NEW) for inode in descriptors}
            self._known = {
                inode: self._identify(inode) if one is _NEW else one for inode, one in known.items()
            }
            return [one for one in self._known.values() if one is not None]

    def shut(self, addresses: set[str]) -> int:
        """End the connections of these callers; returns how many there were."""
        with self._lock:
            count = 0
            for inode, one in self._known.items():
                if one is not None and one.address in addresses and self._reserve >= 0:
                    count += self._with(inode, lambda each: each.shutdown(socket.SHUT_RDWR))
            return count

    def close(self) -> None:
        """Release the reserved descriptor."""
        with self._lock:
            if self._reserve >= 0:
                os.close(self._reserve)
                self._reserve = -1

    def _identify(self, inode: int) -> AcceptedSocket | None:
        addresses: list[str] = []

        def identify(one: socket.socket) -> None:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == self._port:
                host, port = one.getpeername()[:2]  # an OSError for the socket that listens
                addresses.append(join_address(_plain(host), port))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEPALIVE.items():
                    if hasattr(socket, name):
                        one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

        self._with(inode, identify)
        return AcceptedSocket(addresses[0]) if addresses else None

    def _with(self, inode: int, do: Callable[[socket.socket], None]) -> bool:
        """Call a function with a socket, if it still has that inode."""
        with contextlib.suppress(OSError):
            os.dup2(self._descriptors[inode], self._reserve, inheritable=False)
            if os.fstat(self._reserve).st_ino == inode:
                one = socket.socket(fileno=self._reserve)
                try:
                    do(one)
                    return True
                finally:
                    one.detach()
                    self._release()
        self._release()
        return False

    def _release(self) -> None:
        """Release the duplicate, which would hold a connection open; the descriptor stays reserved."""
        os.dup2(_NOTHING, self._reserve, inheritable=False)


def peer_address(peer: str) -> str:
    """ "host:port" from gRPC's notation of a peer, such as ipv4:10.0.0.1:4000 or ipv6:%5B::1%5D:4000."""
    family, _, address = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return peer
    host, _, port = address.rpartition(":")
    return join_address(_plain(host.strip("[]")), int(port)) if port.isdecimal() else peer


def host_of(address: str) -> str:
    """The host of an address as `peer_address` gives it."""
    return address.rpartition(":")[0].strip("[]") or address


def descriptors_left() -> float:
    """The free fraction of this process's descriptors, from 0 to 1."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return 1 - len(os.listdir(_FOLDER)) / most if 0 < most < 2**40 else 1.0
    except OSError:
        return 0.0


def _plain(host: str) -> str:
    """The same text for an IPv4 address at sockets of both families."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_FOLDER)]
    except OSError:  # no descriptor is left for the folder
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return list(range(most if 0 < most < _MOST_DESCRIPTORS else _MOST_DESCRIPTORS))


_NEW = AcceptedSocket("")
_NOTHING = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
