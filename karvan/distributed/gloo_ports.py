"""The ports of gloo, closed as soon as all ranks are connected.

Every group of gloo listens at a port of its own for as long as it lives, without a token. It needs the port
only until its ranks have found each other, which is when the group is made; a stranger could connect later,
and hold file descriptors and memory of the process. So once a group is there, its listening socket gets a
filter that drops every packet (a classic BPF program of one instruction, for which no privilege is needed):
who connects gets no answer. Connections that exist already have sockets of their own, and do not notice.

Only the ports of groups that were made inside of `closing_ports` are closed. A group that a program makes
later has a port of its own, and connects as usual.

If a rank dies, its connections end, as without the filter; gloo never connects a second time. Where sockets
cannot be filtered (not Linux), or gloo connects only when a group is used (TORCH_GLOO_LAZY_INIT), ports stay
open, and the log says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_log = logging.getLogger("karvan.distributed")

_SO_ATTACH_FILTER = 26  # Linux, on all machines that torch is built for
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0, which are the bytes that are let through
_FDS = Path("/proc/self/fd")
_EPOLL = "anon_inode:[eventpoll]"


@contextmanager
def closing_ports() -> Iterator[None]:
    """Close the ports of gloo's groups that are made inside of it."""
    before = set(_links())
    yield
    if _connects_late():
        _log.warning("Ports of gloo stay open: TORCH_GLOO_LAZY_INIT has ranks connect later.")
        return
    try:
        for fd in _gloo_listeners(set(_links()) - before):
            _drop_all(fd)
    except OSError as error:
        _log.warning("Ports of gloo stay open, since their sockets take no filter: %s.", error)


def _gloo_listeners(made: set[tuple[int, str]]) -> list[int]:
    """Those of new descriptors that are sockets which listen, and are watched by a new epoll.

    Every group of gloo makes a pair of them. Other servers of the process have not just been made, or have
    threads in place of an epoll.
    """
    watched: set[int] = set()
    for fd, link in made:
        if link == _EPOLL:
            with suppress(OSError):
                watched |= _watched_by(fd)
    return [fd for fd, link in made if fd in watched and link.startswith("socket:") and _listens(fd)]


def _links() -> Iterator[tuple[int, str]]:
    with suppress(OSError):
        for name in os.listdir(_FDS):
            with suppress(OSError):  # it was closed meanwhile
                yield int(name), os.readlink(_FDS / name)


def _watched_by(epoll: int) -> set[int]:
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _listens(fd: int) -> bool:
    with suppress(OSError), _borrowed(fd) as one:
        internet = one.family in (socket.AF_INET, socket.AF_INET6)
        return internet and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _drop_all(fd: int) -> None:
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    with _borrowed(fd) as one:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket of somebody else's, which stays open."""
    one = socket.socket(fileno=fd)
    try:
        yield one
    finally:
        one.detach()


def _connects_late() -> bool:
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").strip().lower() in ("1", "true", "yes", "on", "y", "t")
