"""Rendezvous of ranks at a store that may hold keys of an earlier generation.

torchrun restarts ranks after one has died, and may give them the same store. Its keys then look like answers
of the new ranks, but are those of processes that have ended. So each process writes a random number: rank 0
writes a roll of all numbers it finds, again whenever one changes, until every rank has confirmed its own
number on the same roll. The roll's name is one that no earlier generation can have used.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from karvan.torch_internals import Store

_POLL = 0.01  # seconds between two reads


def agree_on_name(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that all ranks of this generation get, and no other process."""
    mine = secrets.token_hex(8)
    store.set(f"karvan/hello/{rank}", mine)
    until = time.monotonic() + timeout
    written = ""
    while time.monotonic() < until:
        if rank == 0:
            numbers = [_get(store, f"karvan/hello/{r}") for r in range(world)]
            name = hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:16]
            if all(numbers) and name != written:
                store.set("karvan/roll", json.dumps({"name": name, "numbers": numbers}))
                written = name
        roll = json.loads(_get(store, "karvan/roll") or "{}")
        if roll and len(roll["numbers"]) == world and roll["numbers"][rank] == mine:
            name = roll["name"]
            store.set(f"karvan/here/{name}/{rank}", "yes")
            if rank == 0 and all(_get(store, f"karvan/here/{name}/{r}") for r in range(world)):
                store.set(f"karvan/go/{name}", "yes")
            if _get(store, f"karvan/go/{name}"):
                return str(name)
        time.sleep(_POLL)
    raise TimeoutError(
        f"Rank {rank} expected all {world} ranks to join within {timeout:g} seconds, but they did not."
    )


def _get(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


# `machine_id`: which machine a process is on.


def machine_id() -> str:
    """An identifier that all processes of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


# The ports of gloo, closed as soon as all ranks are connected.
#
# Every group of gloo listens at a separate port for as long as it exists, without a token. It needs the port
# only until its ranks are connected, which is when the group is created; an attacker could connect later, and
# hold file descriptors and memory of the process. So once a group exists, its listening socket gets a filter
# that drops every packet (a classic BPF program of one instruction, for which no privilege is needed): new
# connections get no answer. Existing connections have other sockets, and are not affected.
#
# Only the ports of groups that are created within `closing_ports` are closed. A group that a program creates
# later has another port, and connects as usual.
#
# If a rank dies, its connections end, as without the filter; gloo never reconnects. Where sockets cannot be
# filtered (not Linux), or gloo connects only when a group is used (TORCH_GLOO_LAZY_INIT), ports stay open,
# and a warning is logged.


_log = logging.getLogger("karvan.distributed")

_SO_ATTACH_FILTER = 26  # Linux, on all machines that torch is built for
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0, the number of bytes to accept
_FDS = Path("/proc/self/fd")
_EPOLL = "anon_inode:[eventpoll]"


@contextmanager
def closing_ports() -> Iterator[None]:
    """Close the ports of gloo's groups that are created within it."""
    before = set(_links())
    yield
    if _connects_late():
        _log.warning("Ports of gloo stay open: with TORCH_GLOO_LAZY_INIT, ranks connect later.")
        return
    try:
        for fd in _gloo_listeners(set(_links()) - before):
            _drop_all(fd)
    except OSError as error:
        _log.warning("Ports of gloo stay open, since their sockets do not accept a filter: %s.", error)


def _gloo_listeners(new: set[tuple[int, str]]) -> list[int]:
    """The new descriptors that are listening sockets watched by a new epoll.

    Every group of gloo creates such a pair. Other servers of the process are older, or have threads in place
    of an epoll.
    """
    watched: set[int] = set()
    for fd, link in new:
        if link == _EPOLL:
            with suppress(OSError):
                watched |= _watched_by(fd)
    return [fd for fd, link in new if fd in watched and link.startswith("socket:") and _listens(fd)]


def _links() -> Iterator[tuple[int, str]]:
    with suppress(OSError):
        for name in os.listdir(_FDS):
            with suppress(OSError):  # it was closed in the meantime
                yield int(name), os.readlink(_FDS / name)


def _watched_by(epoll: int) -> set[int]:
    lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    return {int(line.split()[1]) for line in lines if line.startswith("tfd:")}


def _listens(fd: int) -> bool:
    with suppress(OSError), _borrowed(fd) as borrowed:
        internet = borrowed.family in (socket.AF_INET, socket.AF_INET6)
        return internet and bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _drop_all(fd: int) -> None:
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    with _borrowed(fd) as borrowed:
        borrowed.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
        )


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket of another owner, which stays open."""
    socket_ = socket.socket(fileno=fd)
    try:
        yield socket_
    finally:
        socket_.detach()


def _connects_late() -> bool:
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "0").strip().lower() in ("1", "true", "yes", "on", "y", "t")
