"""`CollectiveChannel`: collectives between corresponding threads of all ranks.

Every rank calls the same methods of a channel in the same order. Bytes and numbers in CPU memory are sent,
never pickles. A single process has channels, too, which send nothing, so that callers need no special case.

How ranks find each other (`agree_on_name`, `join_boards`), and who is missing (`RankMonitor`), is here, too.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from karvan.activity import TRAINERS, activity
from karvan.clock import clock
from karvan.native import NativeCoreError, _native
from karvan.torch_internals import Store

_READ_EVERY = 0.01  # seconds between two reads


def agree_on_name(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that all ranks of this generation get, and no other process.

    Rendezvous of ranks at a store that may hold keys of an earlier generation.

    torchrun restarts ranks after one has died, and may give them the same store. Its keys then look like
    answers of the new ranks, but are those of processes that have ended. So each process writes a random
    number: rank 0 writes a roll of all numbers it finds, again whenever one changes, until every rank has
    confirmed its own number on the same roll. The roll's name is one that no earlier generation can have
    used.
    """
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
        time.sleep(_READ_EVERY)
    raise TimeoutError(
        f"Rank {rank} expected all {world} ranks to join within {timeout:g} seconds, but they did not."
    )


def _get(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def machine_id() -> str:
    """An identifier that all processes of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


_log = logging.getLogger("karvan.distributed")

_SO_ATTACH_FILTER = 26  # Linux, on all machines that torch is built for
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: return 0, the number of bytes to accept
_FDS = Path("/proc/self/fd")
_EPOLL = "anon_inode:[eventpoll]"


@contextmanager
def closing_ports() -> Iterator[None]:
    """Close the ports of gloo's groups that are created within it.

    Every group of gloo listens at a separate port for as long as it exists, without a token. It needs the
    port only until its ranks are connected, which is when the group is created; an attacker could connect
    later, and hold file descriptors and memory of the process. So once a group exists, its listening socket
    gets a filter that drops every packet (a classic BPF program of one instruction, for which no privilege is
    needed): new connections get no answer. Existing connections have other sockets, and are not affected.

    Only the ports of groups that are created within `closing_ports` are closed. A group that a program
    creates later has another port, and connects as usual.

    If a rank dies, its connections end, as without the filter; gloo never reconnects. Where sockets cannot be
    filtered (not Linux), or gloo connects only when a group is used (TORCH_GLOO_LAZY_INIT), ports stay open,
    and a warning is logged.
    """
    before = set(_links())
    yield
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").strip().lower()
    if lazy in ("1", "true", "yes", "on", "y", "t"):
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


class RankError(RuntimeError):
    """Another rank has died, hangs, or has failed; the message names it."""


class ChannelLeftError(RankError):
    """This rank has left the channel, since a collective has failed here or elsewhere."""


_POLL = timedelta(seconds=0.1)  # between two checks whether this rank leaves


class CollectiveChannel:
    """The channel of a single process; others derive from it."""

    rank = 0
    world_size = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self.operations = 0  # collectives so far
        self.bytes_sent = 0  # to other ranks, without what the transport adds

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.sum(torch.zeros(1))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; `values` do not change."""
        return values.clone()

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in the order of ranks."""
        return [data]

    def gather_json(self, value: Any) -> list[Any]:
        """The same for any JSON value."""
        return [json.loads(data) for data in self.gather(json.dumps(value).encode())]

    def swap(self, numbers: Tensor) -> Tensor:
        """Send row r of `numbers`, (world, n), to rank r; row r of the result is from rank r."""
        return numbers.clone()

    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        """Send parts of a flat tensor to all ranks: to[r] elements go to rank r, of[r] come from rank r."""
        return send

    def leave(self) -> None:
        """End a running collective of another thread of this process, and all later ones, with a RankError.

        Other ranks are not informed, and the channel cannot be used any more.
        """


# From a channel whose collective has failed, the rank that was lost, if known, and the cause: what to raise.
Explain: TypeAlias = Callable[[CollectiveChannel, int | None, Exception], Exception]


class GlooChannel(CollectiveChannel):
    """A channel over a separate process group of gloo."""

    def __init__(self, name: str, group: dist.ProcessGroup, explain: Explain) -> None:
        super().__init__(name)
        self.rank = group.rank()
        self.world_size = group.size()
        self._group = group
        self._explain = explain
        self._left = False

    @override
    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        self._do(lambda: self._group.allreduce([total]))
        self.bytes_sent += 2 * total.nbytes * (self.world_size - 1) // self.world_size
        return total

    @override
    def gather(self, data: bytes) -> list[bytes]:
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        sizes = self.sum(sizes)
        longest = int(sizes.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = _bytes(data)
        received = [torch.empty_like(mine) for _ in range(self.world_size)]
        if longest:
            self._do(lambda: self._group.allgather([received], [mine]))
            self.bytes_sent += longest * (self.world_size - 1)
        return [bytes(part[:size].numpy()) for part, size in zip(received, sizes.tolist(), strict=True)]

    @override
    def swap(self, numbers: Tensor) -> Tensor:
        received = torch.empty_like(numbers)
        self._do(lambda: self._group.alltoall_base(received, numbers.contiguous(), [], []))
        self.bytes_sent += numbers[0].nbytes * (self.world_size - 1)
        return received

    @override
    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        received = send.new_empty(sum(of))
        self._do(lambda: self._group.alltoall_base(received, send, list(of), list(to)))
        self.bytes_sent += (sum(to) - to[self.rank]) * send.element_size()
        return received

    @override
    def leave(self) -> None:
        """Gloo cannot stop the operation itself."""
        self._left = True

    def _do(self, operation: Callable[[], Any]) -> None:
        """Start an operation and wait for it, never long inside of torch: see `keep_forever` for why."""
        self.operations += 1
        try:
            work = None if self._left else operation()
            with activity.waiting(TRAINERS):
                while work is not None and not work.is_completed():
                    if self._left:
                        keep_forever(self._group)
                        work = None
                    else:
                        with suppress(RuntimeError):  # a timeout; any other error is raised again below
                            work.wait(_POLL)
                if work is not None:
                    work.wait()
        except (RuntimeError, ValueError) as error:
            raise self._explain(self, None, error) from error
        if work is None:
            raise _left(self)


class SharedMemoryChannel(CollectiveChannel):
    """A channel between processes of one machine, in shared memory; several times as fast as a network."""

    def __init__(
        self, name: str, board: _native.Board, rank: int, world: int, timeout: float, explain: Explain
    ) -> None:
        super().__init__(name)
        self.rank = rank
        self.world_size = world
        self._board = board
        self._timeout = timeout
        self._explain = explain

    @override
    def sum(self, values: Tensor) -> Tensor:
        """In the order of ranks."""
        flat = values.reshape(-1)
        pieces = self.exchange(
            flat.repeat(self.world_size), [len(flat)] * self.world_size, [len(flat)] * self.world_size
        )
        total = pieces[: len(flat)].clone()
        for rank in range(1, self.world_size):
            total += pieces[rank * len(flat) : (rank + 1) * len(flat)]
        return total.view(values.shape)

    @override
    def gather(self, data: bytes) -> list[bytes]:
        sizes = self.swap(torch.full((self.world_size, 1), len(data))).flatten().tolist()
        received = self.exchange(_bytes(data).repeat(self.world_size), [len(data)] * self.world_size, sizes)
        return [bytes(part.numpy()) for part in torch.split(received, sizes)]

    @override
    def swap(self, numbers: Tensor) -> Tensor:
        width = [numbers[0].numel()] * self.world_size
        return self.exchange(numbers.reshape(-1), width, width).view(numbers.shape)

    @override
    def exchange(self, send: Tensor, to: Sequence[int], of: Sequence[int]) -> Tensor:
        self.operations += 1
        send, size = send.contiguous(), send.element_size()
        received = send.new_empty(sum(of))
        with activity.waiting(TRAINERS):
            outcome = self._board.exchange(
                send.data_ptr(),
                [n * size for n in to],
                received.data_ptr(),
                [n * size for n in of],
                self._timeout,
            )
        if outcome != "done":
            if outcome == "left":
                raise _left(self)
            if outcome == "lost":
                raise self._explain(self, self._board.missing, ConnectionError("its process has ended"))
            raise self._explain(self, None, TimeoutError(f"nothing for {self._timeout:g} seconds"))
        self.bytes_sent += (sum(to) - to[self.rank]) * size
        return received

    @override
    def leave(self) -> None:
        self._board.leave()


def keep_forever(group: dist.ProcessGroup) -> None:
    """Never destroy a process group with an operation that does not end: destroying it would wait for that.

    The interpreter would do so when it ends, too. It also kills a thread that then returns from a native
    call, for which C++ ends the entire program ("terminate called"). So no thread may be inside of an
    operation at that time, and groups with a running operation must stay.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _left(channel: CollectiveChannel) -> ChannelLeftError:
    return ChannelLeftError(
        f"This rank has left channel '{channel.name}' after an error, and cannot use it any more."
    )


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def join_boards(
    names: Sequence[str],
    rank: int,
    world: int,
    share: Callable[[str, Any], list[Any]],
    *,
    wanted: bool = True,
) -> dict[str, _native.Board] | None:
    """Shared memory of all ranks for each channel; None if it is not possible for one of them.

    share: gives the values of all ranks, for a value of this one and its name. wanted: whether this rank uses
    shared memory if it is possible.
    """
    boards: dict[str, _native.Board] = {}
    error = ""
    try:
        boards = {name: _native.Board(rank, world) for name in (names if wanted else ())}
    except (RuntimeError, OSError, NativeCoreError) as reason:
        error = str(reason)
    place = {"machine": machine_id(), "places": {name: board.place for name, board in boards.items()}}
    ranks = share("places", place)
    try:
        if any(its["machine"] != place["machine"] or len(its["places"]) < len(names) for its in ranks):
            error = error or "ranks are on several machines"
        else:
            for name, board in boards.items():
                board.join([tuple(its["places"][name]) for its in ranks])
    except (RuntimeError, OSError) as reason:
        error = str(reason)
    errors = [problem for problem in share("memory", error) if problem]
    if errors:
        _log.info("Ranks communicate over the network: %s.", errors[0])
    return None if errors else boards


class RankHeartbeats:
    """Heartbeats of ranks that work for minutes, so that no rank waits longer than a channel allows.

    All ranks take part in each round; the work is done when all say so.

    """

    def __init__(self, channel: CollectiveChannel, timeout: float) -> None:
        self._channel = channel
        self._every = min(30.0, timeout / 4)
        self._last = time.monotonic()
        self._broken = False

    def still_working(self) -> None:
        """Called between parts of the work; does a round if it is time for one."""
        if time.monotonic() >= self._last + self._every:
            self._round(0)

    def finish(self) -> None:
        """Wait until all ranks have finished their work, successfully or not."""
        while not self._broken and self._round(1) < self._channel.world_size:
            pass

    def _round(self, done: int) -> int:
        self._broken = True
        total = int(self._channel.sum(torch.tensor([done])).item())
        self._broken = False
        self._last = time.monotonic()
        return total


_BEAT = 1.0  # seconds between two heartbeats
_LOST = 3.5  # seconds without one after which a rank counts as dead or stopped


class RankMonitor:
    """Sends the heartbeats of this rank, and finds the ranks that send none."""

    def __init__(
        self, store: Store, rank: int, world: int, progress: Callable[[], Mapping[str, int]]
    ) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._progress = progress
        self._beats = 0
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="karvan-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more heartbeats."""
        self._ended.set()
        self._thread.join(_BEAT)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks, which will miss this one, why it has failed."""
        if isinstance(error, RankError):  # of another rank, which `explain` has reported
            return
        name = _name(self._rank, {"pid": os.getpid(), "host": os.uname().nodename})
        with suppress(RuntimeError):
            self._say("failed", f"{name} has failed with {type(error).__name__}: {_short(error)}")

    def explain(self, channel: str, lost: int | None, error: Exception) -> RankError:
        """An error that names the rank because of which a collective on a channel has failed.

        lost: a rank whose process is known to have ended, perhaps because it has lost another one.
        """
        who = self._missing(channel) if lost is None else self._ended_first(lost)
        with suppress(RuntimeError):  # the store may be gone as well
            self._say("failed", who or str(error))
        return RankError(f"{who or 'A rank has failed, it is not known which'}: {_short(error)}")

    def _ended_first(self, lost: int) -> str:
        try:
            alive, failed = self._all("alive"), self._all("failed")
        except (RuntimeError, ValueError):
            return f"Rank {lost} has died"
        return str(failed.get(lost) or f"{_name(lost, alive.get(lost))} has died")

    def _missing(self, channel: str) -> str | None:
        try:
            before = self._all("alive")
            if not self._reported(self._all("failed")):
                clock.sleep(_LOST)
            after, failed = self._all("alive"), self._all("failed")
        except (RuntimeError, ValueError):
            return "The process that holds the ranks' store (rank 0, or torchrun) is gone"
        if failure := self._reported(failed):
            return failure
        others = [rank for rank in range(self._world) if rank != self._rank]
        silent = [r for r in others if after.get(r) == before.get(r)]
        if silent:
            where = ", ".join(_name(rank, after.get(rank)) for rank in silent)
            return f"{where} {'has' if len(silent) == 1 else 'have'} died or stopped"
        count = self._progress().get(channel, 0)
        slow = [r for r in others if after.get(r, {}).get("at", {}).get(channel, 0) < count]
        if slow:
            where = ", ".join(_name(rank, after.get(rank)) for rank in slow)
            return f"{where} {'does' if len(slow) == 1 else 'do'} not reach operation {count} of '{channel}'"
        return None

    def _reported(self, failed: Mapping[int, Any]) -> str | None:
        """The failure that another rank has reported, if any."""
        return next((str(failed[rank]) for rank in sorted(failed) if rank != self._rank), None)

    def _all(self, what: str) -> dict[int, Any]:
        keys = {rank: f"karvan/{what}/{rank}" for rank in range(self._world)}
        return {
            rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }

    def _run(self) -> None:
        while not self._ended.wait(_BEAT):
            try:
                self._beat()
            except (RuntimeError, ValueError):  # the store is gone, and the job with it
                return

    def _beat(self) -> None:
        self._beats += 1
        at = dict(self._progress())
        self._say("alive", {"beat": self._beats, "pid": os.getpid(), "host": os.uname().nodename, "at": at})

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"karvan/{what}/{self._rank}", json.dumps(value))


def _name(rank: int, alive: Any) -> str:
    return f"Rank {rank} (process {alive['pid']} on {alive['host']})" if alive else f"Rank {rank}"


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
