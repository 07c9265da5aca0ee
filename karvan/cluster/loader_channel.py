"""`LoaderChannel`: the batches of one loader for a trainer with a fixed share, and the trainer's position.

A channel has several calls in flight, and waits for a loader that is replaced. It says hello to that one with
what the trainer needs by then; `karvan/cluster/loader/epoch_service.py` has the protocol.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from karvan.clock import clock
from karvan.cluster.loader.service import BatchName
from karvan.cluster.loader_access import LEAVE_WITHIN, LoaderAccess
from karvan.data.loading.rank_shares import kind_of, mismatch, stream_of
from karvan.protocol import loader as protocol
from karvan.protocol.loader import NoAnswerYet
from karvan.ragged import IdsReference
from karvan.threads import map_on_threads
from karvan.wire import Array, Client, Message, RefusedError, Reply, WireError
from karvan.wire.message import Sent
from karvan.wire.schema import Call

A = TypeVar("A")

_POSITIONS = 8  # of batches handed out: reading can restart where the slowest trainer is, that many behind

# The position of trainers in the batches of all loaders, valid for any number of trainers.
#
# A state lists, for each loader, the indices that were taken: all below `begin`, those in `taken`, and for
# each trainer in `next`, its own ones below that number. `merge` joins the states of all trainers into one
# without `next`.
# `positions` are [index, position of the loader's source before it]; `end` is [number of batches, position of
# the source after them] once that is known.


VERSION = 1

Known = tuple[int, Any]  # index, and the source's position before it


@dataclass(frozen=True)
class StreamBase:
    """What had been taken of one loader's epoch when the trainers started, by any trainer."""

    begin: int = 0
    taken: frozenset[int] = frozenset()
    position: Known = (0, None)  # the last one known that is not after `begin`

    def has(self, index: int) -> bool:
        """Whether it was taken."""
        return index < self.begin or index in self.taken


def state_of(
    epoch: int, trainers: int, ranks: Iterable[int], loaders: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """A state, as values for JSON."""
    return {
        "version": VERSION,
        "epoch": epoch,
        "trainers": trainers,
        "ranks": list(ranks),
        "loaders": list(loaders),
    }


def loader_state(
    base: StreamBase, positions: Iterable[Known], end: Known | None, next_of: Mapping[int, int]
) -> dict[str, Any]:
    """The part of a state for one loader."""
    return {
        "begin": base.begin,
        "taken": sorted(base.taken),
        "positions": [list(pair) for pair in (base.position, *positions)],
        "end": None if end is None else list(end),
        "next": {str(rank): index for rank, index in next_of.items()},
    }


def base_of(loader: Mapping[str, Any]) -> StreamBase:
    """The base in the part of a state for one loader."""
    index, position = loader["positions"][0]
    return StreamBase(int(loader["begin"]), frozenset(map(int, loader["taken"])), (int(index), position))


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all trainers of a job into one that any number of trainers can continue from."""
    states = list(states)
    if not states:
        raise ValueError("merge needs the state of at least one trainer, got none.")
    first = states[0]
    for state in states:
        check(state)
        for name, got, expected in (
            ("epoch", state["epoch"], first["epoch"]),
            ("number of trainers", state["trainers"], first["trainers"]),
            ("number of loaders", len(state["loaders"]), len(first["loaders"])),
        ):
            if got != expected:
                raise ValueError(f"States to merge must have the same {name}, got {expected} and {got}.")
    ranks = sorted({rank for state in states for rank in state["ranks"]})
    if len(ranks) != first["trainers"]:
        raise ValueError(
            f"merge needs the states of all {first['trainers']} trainers, got only the states of {ranks}."
        )
    loaders = [
        _merged(
            [state["loaders"][index] for state in states], index, len(first["loaders"]), first["trainers"]
        )
        for index in range(len(first["loaders"]))
    ]
    return state_of(first["epoch"], first["trainers"], ranks, loaders)


def check(state: Mapping[str, Any], loaders: int | None = None) -> None:
    """Raise unless it is a state of this version, and of `loaders` loaders if that is not None."""
    if "loaders" not in state or (loaders is not None and len(state["loaders"]) != loaders):
        raise ValueError(
            mismatch(kind_of(state), "kv.data.from_loaders()" if loaders is None else stream_of(loaders))
        )
    if state.get("version") != VERSION:
        raise ValueError(
            f"A position of kv.data.from_loaders() must have version {VERSION}, but has "
            f"{state.get('version')!r}. Another version of karvan saved it: finish the epoch with that one, "
            "or start without a position."
        )


def start_of_epoch(loaders: int) -> list[dict[str, Any]]:
    """The loaders' parts of a state before the first batch of an epoch."""
    return [loader_state(StreamBase(), (), None, {}) for _ in range(loaders)]


def _merged(states: list[Mapping[str, Any]], loader: int, loaders: int, trainers: int) -> dict[str, Any]:
    bases = [base_of(state) for state in states]
    if any((base.begin, base.taken) != (bases[0].begin, bases[0].taken) for base in bases):
        raise ValueError("States to merge must come from trainers that started together.")
    next_of = {int(rank): index for state in states for rank, index in state["next"].items()}

    def has(index: int) -> bool:
        return bases[0].has(index) or index < next_of.get((index * loaders + loader) % trainers, 0)

    last = max([bases[0].begin, *next_of.values(), *(index + 1 for index in bases[0].taken)])
    begin = bases[0].begin
    while begin < last and has(begin):
        begin += 1
    positions = [(int(index), position) for state in states for index, position in state["positions"]]
    best = max((pair for pair in positions if pair[0] <= begin), key=lambda pair: pair[0])
    trained = frozenset(index for index in range(begin, last) if has(index))
    end = next((tuple(state["end"]) for state in states if state["end"] is not None), None)
    return loader_state(StreamBase(begin, trained, best), (), end, {})


@dataclass(frozen=True)
class ChannelSettings:
    """What all channels of a trainer have in common."""

    rank: int
    world_size: int
    generation: int
    ids: Sequence[str]
    prefetch: int
    access: LoaderAccess


class _WaitingBatch(NamedTuple):
    """A batch that waits, and where its loader can start to read it again."""

    head: protocol.EpochBatch
    arrays: Sequence[Array]
    before: Known


class _Unfinished(NamedTuple):
    """A batch that was handed out, whose ids an embedding worker has, while its reference exists."""

    epoch: int
    number: int
    before: Known
    reference: weakref.ref[IdsReference]


class LoaderChannel:
    """Batches of loader number `loader`, from a saved state on.

    shape: the trainer's rank, how many trainers and how many loaders there are. All but the calls happens
    under the stream's lock `changed`. caller: as which trainer it connects; set before the first call.
    """

    caller: ChannelSettings

    def __init__(
        self,
        loader: int,
        changed: threading.Condition,
        epoch: int,
        state: Mapping[str, Any],
        shape: tuple[int, int, int],
    ) -> None:
        rank, world, loaders = shape
        self.loader = loader
        self.name = f"loader {loader}"
        self.epoch = epoch
        self.waiting: deque[_WaitingBatch] = deque()
        self.end: Known | None = None  # of its epoch: how many batches, and the position after them
        self._missing: list[int] = []  # trainers that the loader waits for
        self._error: Exception | None = None
        self._changed = changed
        self._base = base_of(state)
        # The index after the last batch that was handed out, and that was received.
        self._next = self._received = int(state["next"].get(str(rank), 0))
        positions = ((int(index), position) for index, position in state["positions"][1:])
        self._positions: deque[Known] = deque(positions, maxlen=_POSITIONS)
        # The last position received of the epoch.
        self._last = self._positions[-1] if self._positions else self._base.position
        self._unfinished: list[_Unfinished] = []
        self._run = secrets.token_hex(8)
        self._asked = 0
        self._left = False
        self._clients: dict[str, Client] = {}
        if state["end"] is not None:
            total, position = state["end"]
            indices = range(self.first, total)
            mine = (index for index in indices if (index * loaders + loader) % world == rank)
            if not any(map(self.wants, mine)):  # otherwise the end comes again, after what remains
                self.end = (int(total), position)

    def state(self, rank: int) -> dict[str, Any]:
        """The position, as `loader_state` describes it."""
        with self._changed:
            return loader_state(self._base, self._positions, self.end, {rank: self._next})

    @property
    def first(self) -> int:
        """Batches before this index are not needed."""
        return max(self._base.begin, self._next)

    def wants(self, index: int) -> bool:
        """Whether a batch of this trainer has not been taken yet, as far as is known."""
        is_trained = index < self._next or self._base.has(index)
        return not is_trained and (self.end is None or index < self.end[0])

    @property
    def ended(self) -> bool:
        """Whether the end of the epoch was received; batches come before it."""
        return self.end is not None

    def ask(self) -> None:
        """Keep `prefetch` calls in flight."""
        with self._changed:
            if "watch" not in self._clients:
                self._client("watch").begin(protocol.STAY, then=self._stayed)
            if self.end is not None or self._error is not None:
                return
            number = self.caller.prefetch - self._asked - len(self.waiting)
            self._asked += max(0, number)
            client, epoch = self._client("batches"), self.epoch
        try:
            for _ in range(number):
                client.begin(
                    protocol.NEXT, protocol.EpochNumber(epoch=epoch), then=partial(self._arrived, epoch)
                )
        except (WireError, RefusedError) as error:
            self._fail(error)

    def take(self) -> tuple[_WaitingBatch, IdsReference | None]:
        """The next batch, which then counts as handed out, and the reference to its ids if a worker has them.

        The batch is unfinished for as long as the reference exists.
        """
        with self._changed:
            batch, reference = self.waiting.popleft(), None
            head = batch.head
            self._next = head.index + 1
            self._positions.append((self._next, head.position))
            if head.reference is not None and head.worker is not None:
                reference = IdsReference(head.worker, BatchName(*head.reference).name, head.rows)
                self._unfinished = [batch_ for batch_ in self._unfinished if batch_.reference() is not None]
                self._unfinished.append(
                    _Unfinished(self.epoch, head.index, batch.before, weakref.ref(reference))
                )
        self.ask()
        return batch, reference

    def resend(self, reference: BatchName, worker: int) -> str:
        """Have the loader send the ids of a batch to a worker again; returns when the worker has them.

        A loader that was replaced has to read the batch first. Returns the digest of its statistics.
        """
        head = protocol.IdsOfBatch(reference=reference, worker=worker)
        return self.answer(protocol.RESEND, head, f"to read batch {reference} again").head.statistics

    def check(self, waited: float) -> None:
        """Raise if no batch will come."""
        if self._error is not None:
            raise self._error
        if waited > self.caller.access.timeout and self._missing:
            who = ", ".join(map(str, self._missing))
            raise WireError(f"{self.name} expected all trainers in time, got nothing from trainer {who}.")

    def next_epoch(self) -> None:
        """Go to the next epoch: this one was taken to its end."""
        with self._changed:
            assert self.end is not None
            self._base = StreamBase(position=(0, self.end[1]))
            self._next = self._received = 0
            self._positions.clear()
            self._last = self._base.position
            self.epoch += 1
            self.end = None

    def answer(
        self,
        call: Call[Any, NoAnswerYet | A],
        head: Sent | None = None,
        what: str = "its program to start sending batches",
    ) -> Message[A]:
        """The loader's answer, once it has one; what: it is expected to do before."""
        deadline = clock.now() + self.caller.access.timeout
        while isinstance((answer := self.call(call, head).wait()).head, NoAnswerYet):
            if clock.now() > deadline:
                raise WireError(f"{self.name} expected {what} in time.")
        return Message(answer.head, answer.arrays)

    def call(self, call: Call[Any, A], head: Sent | None = None, deadline: float | None = None) -> Reply[A]:
        """A call that does not wait behind those for batches."""
        with self._changed:
            client = self._client("control")
        return client.begin(call, head, deadline=deadline)

    def leave(self) -> None:
        """Tell the loader that this trainer needs no more."""
        if not self._clients:
            return
        self._left = True
        if not isinstance(self._error, WireError | RefusedError):  # otherwise there is no loader to call
            with contextlib.suppress(WireError, RefusedError, RuntimeError):
                self.call(protocol.LEAVE, deadline=LEAVE_WITHIN).wait()
        for client in self._clients.values():
            client.close()

    def _client(self, kind: str) -> Client:
        if kind not in self._clients:
            access = self.caller.access
            self._clients[kind] = Client(
                self.name,
                partial(access.find, self.loader),
                access.security,
                hello=partial(self._hello, kind, self.caller),
                deadline=access.timeout,
                forgetful=True,
            )
        return self._clients[kind]

    def _hello(self, kind: str, caller: ChannelSettings) -> dict[str, Any]:
        """What a loader has to know when this trainer connects for the first time."""
        who = {
            "kind": kind,
            "run": self._run,
            "generation": caller.generation,
            "trainer": caller.rank,
            "trainers": caller.world_size,
            "loader": self.loader,
            "loaders": caller.access.count,
        }
        with self._changed:
            received = [(batch.head.index + 1, batch.head.position) for batch in self.waiting]
            # Batches with a reference, also those that wait: epoch, index and what is before them.
            unfinished = [batch[:3] for batch in self._unfinished if batch.reference() is not None]
            unfinished += [
                (self.epoch, head.index, before)
                for head, _, before in self.waiting
                if head.reference is not None
            ]
            oldest = min(unfinished, key=lambda batch: batch[:2], default=None)
            return {
                **who,
                "ids": list(caller.ids),
                "epoch": self.epoch,
                "next": max(self._base.begin, self._received),
                "taken": sorted(self._base.taken),
                "end": self.end,
                "positions": [self._base.position, *self._positions, *received],
                "unfinished": [batch[:2] for batch in unfinished],
                "before_unfinished": None if oldest is None else (oldest[0], *oldest[2]),
            }

    def _arrived(
        self, epoch: int, reply: Reply[protocol.MissingTrainers | protocol.EndOfEpoch | protocol.EpochBatch]
    ) -> None:
        with self._changed:
            self._asked -= 1
            if reply.error is not None:
                self._error = self._error or reply.error
            elif epoch == self.epoch:
                answer = reply.wait()
                self._receive(answer.head, answer.arrays)
            self._changed.notify_all()
        self.ask()

    def _stayed(self, reply: Reply[Any]) -> None:
        """Call `stay` again: the loader, or the one that replaces it, must know this trainer at any time."""
        if reply.error is not None:
            self._fail(reply.error)
        elif not self._left:
            with contextlib.suppress(WireError, RefusedError):
                self._clients["watch"].begin(protocol.STAY, then=self._stayed)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _receive(
        self,
        head: protocol.MissingTrainers | protocol.EndOfEpoch | protocol.EpochBatch,
        arrays: Sequence[Array],
    ) -> None:
        self._missing = head.wait if isinstance(head, protocol.MissingTrainers) else []
        if isinstance(head, protocol.EndOfEpoch):
            self.end = self.end or (head.end, head.position)
        elif isinstance(head, protocol.EpochBatch) and head.index >= self._received:
            self._received = head.index + 1
            self.waiting.append(_WaitingBatch(head, arrays, self._last))
            self._last = self._received, head.position


def leave_all(channels: Sequence[LoaderChannel]) -> None:
    """Leave all loaders, in parallel."""
    with contextlib.suppress(RuntimeError):  # threads cannot be started while the process exits
        map_on_threads(LoaderChannel.leave, channels, len(channels))
