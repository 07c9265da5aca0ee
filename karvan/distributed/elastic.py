"""Trainers of an elastic job as a group: who is in it, their calls, and sums in one order."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from karvan.activity import TRAINERS, activity
from karvan.distributed.collectives import (
    ChannelLeftError,
    CollectiveChannel,
    GlooChannel,
    RankError,
    SharedMemoryChannel,
    closing_ports,
    join_boards,
    keep_forever,
)
from karvan.errors import RefusedError
from karvan.protocol.master import ENTER_GROUP, JOIN_GROUP, LEAVE_GROUP, SETTLE_GROUP, WATCH_GROUP, RoundState
from karvan.torch_internals import PrefixStore, Store
from karvan.wire import Client, Security

_DEADLINE = 600.0  # seconds in which a master must come back


class GroupRound(NamedTuple):
    """A round of the group: its number, its members in the order of their ranks, and its run."""

    number: int
    members: tuple[int, ...]
    run: str


class GroupClient:
    """Calls under the name of this process. It outlives the master: calls wait for the next one."""

    def __init__(self, find: str | Callable[[], str], process: str, security: Security | None = None) -> None:
        self.process = process
        self.member = -1  # until it has entered
        self.group = ""  # the name of the group, which its trainers share, once it has entered
        self._client = Client("master", find, security, deadline=_DEADLINE, forgetful=True)

    def enter(self) -> str:
        """Get a number, `member`, and the name of the group; returns the name of the run."""
        answer = self._client.call(ENTER_GROUP, {"process": self.process}).head
        self.member, self.group = answer.member, answer.group
        return answer.run

    def join(self, round_number: int, lost: Iterable[int] = ()) -> GroupRound | None:
        """Ask for a round after this one, 0 for any; None: not yet. lost: members whose processes ended."""
        head = {"process": self.process, "round": round_number, "lost": list(lost)}
        answer = self._client.call(JOIN_GROUP, head).head
        self.member = answer.member
        return GroupRound(answer.round, tuple(answer.members), answer.run) if answer.round else None

    def watch(self, round_number: int) -> RoundState:
        """What has happened to a round; see `karvan/work/trainer_group.py`."""
        return self._client.call(WATCH_GROUP, {"process": self.process, "round": round_number}).head

    def settle(self, round_number: int) -> None:
        """The members of a round have settled what those that are gone have done."""
        self._client.call(SETTLE_GROUP, {"process": self.process, "round": round_number})

    def leave(self, within: float | None = None) -> None:
        """Leave the group for good. within: seconds in which the master must answer; by default minutes."""
        self._client.call(LEAVE_GROUP, {"process": self.process}, deadline=within)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class ProgramCalls:
    """The calls of this process."""

    def __init__(self) -> None:
        self.last = 0  # the number of the call in progress, or of the last one
        self.passed = 0  # the first call that is not over: other trainers were in it or in later ones
        self.in_fit = False
        self.finished = 0  # fits
        self.predicts = False  # whether an iterator of predictions is open

    @contextmanager
    def fit(self) -> Iterator[int]:
        """While this process is in a fit; gives its number."""
        self.last += 1
        self.in_fit = True
        try:
            yield self.last
            self.finished += 1
        finally:
            self.in_fit = False


@dataclass(frozen=True)
class Standing:
    """How far a trainer is, for JSON.

    begun: it has the state of the fit that it is in, or of the last one if it predicts. knows: it has it, or
    has finished a fit before. actions: how many of the fit are complete; last: the last one, and its result.
    """

    call: int
    begun: bool
    knows: bool
    actions: int
    last: dict[str, Any] | None


class Standings:
    """Those of all trainers of a round, in the order of ranks.

    Which fit or prediction of its program a trainer is in, and what follows if others are elsewhere.

    All trainers run the same program, so they count the same *calls*: its fits, and its predictions of leased
    data. One that was started again begins at the first call, while others are in a later one.

    When trainers meet in a round, each says its `Standing`. Those that *know* the state of training, because
    they train or have trained, share it with the others. A trainer that does not know it, and is in an
    earlier call than all who do, skips the calls up to the earliest of theirs: what they were for is done.
    Those in a later call than others wait for these in the next round.
    """

    def __init__(self, standings: Sequence[Standing]) -> None:
        self._said = standings
        self.leader = max(
            range(len(standings)),
            key=lambda rank: (
                standings[rank].begun,
                standings[rank].knows,
                standings[rank].call,
                standings[rank].actions,
                -rank,
            ),
        )

    @property
    def first(self) -> Standing:
        """That of the leader, who is farthest of all that have the state, and shares it."""
        return self._said[self.leader]

    @property
    def together(self) -> bool:
        """Whether all are in the same call."""
        return all(standing.call == self.first.call for standing in self._said)

    @property
    def passed(self) -> int:
        """The earliest call of those that know the state of training; 0 if nobody does."""
        return min((standing.call for standing in self._said if standing.knows), default=0)

    def receives(self, rank: int) -> bool:
        """Whether a trainer gets the state from the leader, or would if it were another."""
        its = self._said[rank]
        return not its.begun and (its.call == self.first.call or not its.knows)

    @property
    def shares(self) -> bool:
        """Whether somebody gets the state from the leader."""
        return any(self.receives(rank) for rank in range(len(self._said)))

    def ahead_of(self, call: int) -> list[int]:
        """The ranks in later calls."""
        return [rank for rank, standing in enumerate(self._said) if standing.call > call]


_log = logging.getLogger("karvan.distributed")

_POLL = 0.02  # seconds between two questions for the next round
_WATCH = 0.2  # seconds between two questions about the current one


class _BrokenRoundError(Exception):
    """A round was broken while it began."""


class ElasticGroup:
    """The trainers that train together, as the master decides.

    store: where members meet. transport, timeout: see `kv.connect`.

    The trainers of a round (`karvan/work/trainer_group.py`) have a channel between them, as ranks of a fixed
    group have. When a member dies or leaves, or somebody joins, the round is over: collectives raise a
    RankError, and `regroup` makes the channel of the next round, in the same process.

    To the rest of the program such a trainer is alone: the connection that has the group is that of a single
    process. Only elastic training knows of the others. Ranks are those of the current round; what must be
    known for longer is known by the number of the member, which no other process gets.
    """

    def __init__(
        self, client: GroupClient, store: Store, *, transport: str = "auto", timeout: float = 300.0
    ) -> None:
        self.client = client
        self._store = store
        self._transport = transport
        self._timeout = timeout
        self._lock = threading.Lock()
        self._lost: set[int] = set()  # members of the round whose processes have ended
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        self.round = GroupRound(0, (), "")
        self.gone: set[int] = set()  # members of earlier rounds that are not in this one
        self.channel = CollectiveChannel("group")
        self.regroup_wanted = False  # whether somebody wants to join, or the round is broken
        self.waiting: frozenset[int] = frozenset()  # members and joiners that wait for the next round
        self.calls = ProgramCalls()

    @property
    def rank(self) -> int:
        """That of this trainer in the round; 0 is the one that has been there for longest."""
        return self.channel.rank

    @property
    def world_size(self) -> int:
        """How many trainers the round has."""
        return self.channel.world_size

    @property
    def member(self) -> int:
        """The number of this trainer, for as long as it lives."""
        return self.client.member

    def regroup(self) -> GroupRound:
        """Wait for the next round, and become a member of it.

        A RefusedError if the others have continued without this trainer.
        """
        self.channel.leave()
        with activity.waiting(TRAINERS):
            while True:
                with self._lock:
                    lost = set(self._lost)
                group_round = self.client.join(self.round.number, lost)
                if group_round is not None and self._enter(group_round):
                    return group_round
                time.sleep(_POLL)

    def describe_loss(self, error: RankError) -> str:
        """Say which trainers were lost, if that is known, or else the error that this one got."""
        with self._lock:
            members = self.round.members
            lost = sorted(members.index(member) for member in self._lost if member in members)
        if not lost and isinstance(error, ChannelLeftError):
            return "Another trainer could not complete a collective. The trainers meet again."
        if not lost:
            return f"{error} The trainers meet again."
        ranks = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
        return f"Lost {ranks} of {len(members)} trainers; the others continue."

    def settle(self) -> None:
        """The members of the round have settled what those that are gone have done; said by rank 0."""
        self.client.settle(self.round.number)
        self.gone = set()

    def leave(self, within: float | None = None) -> None:
        """Leave the group for good; the others continue. within: see `GroupClient.leave`."""
        self.channel.leave()
        self.client.leave(within)
        self.channel = CollectiveChannel("group")

    def dissolve(self) -> None:
        """Be alone again; `regroup` meets the others, who must do the same."""
        self.channel.leave()
        self.channel = CollectiveChannel("group")

    def close(self) -> None:
        """Leave the group, and disconnect from the master."""
        self._ended.set()
        self.channel.leave()
        if self._watcher is not None:
            self._watcher.join()
        self.client.close()

    # A new round

    def _enter(self, group_round: GroupRound) -> bool:
        """Make the channels of a round; whether that has worked, or the round was broken meanwhile."""
        rank, world = group_round.members.index(self.member), len(group_round.members)
        with self._lock:
            self.gone = (self.gone | set(self.round.members)) - set(group_round.members)
            self.round = group_round
            self.regroup_wanted = False
            self.waiting = frozenset()
            self._lost = set()
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="karvan-group", daemon=True)
            self._watcher.start()
        try:
            self.channel = self._make_channel(group_round, rank, world)
        except _BrokenRoundError:
            return False
        _log.info("Round %d: rank %d of %d.", group_round.number, rank, world)
        return True

    def _make_channel(self, group_round: GroupRound, rank: int, world: int) -> CollectiveChannel:
        if world == 1:
            return CollectiveChannel("group")
        wanted = self._transport != "network"
        boards = join_boards(["group"], rank, world, partial(self._share, group_round), wanted=wanted)
        if boards is not None:
            return SharedMemoryChannel("group", boards["group"], rank, world, self._timeout, self._explain)
        store = PrefixStore(f"group/{group_round.number}", self._store)
        try:
            with closing_ports():
                group: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            _log.info("Round %d was broken while it began: %s", group_round.number, error)
            raise _BrokenRoundError from error
        keep_forever(group)  # destroying a group waits for its operations
        return GlooChannel("group", group, self._explain)

    def _share(self, group_round: GroupRound, what: str, value: Any) -> list[Any]:
        """The values of all members of a round; a _BrokenRoundError if it was broken meanwhile."""
        rank = group_round.members.index(self.member)
        keys = [f"group/{group_round.number}/{what}/{rank}" for rank in range(len(group_round.members))]
        self._store.set(keys[rank], json.dumps(value))
        while not self._store.check(keys):
            with self._lock:
                lost = self.regroup_wanted and self._lost
            if lost or self.client.watch(group_round.number).broken:
                raise _BrokenRoundError
            time.sleep(_POLL)
        return [json.loads(self._store.get(key)) for key in keys]

    def _watch(self) -> None:
        """The thread: learns from the master what has happened to the round."""
        while not self._ended.wait(_WATCH):
            number = self.round.number
            try:
                state = self.client.watch(number)
            except RefusedError as error:
                _log.warning("%s", error)
                self.regroup_wanted = True  # where it is raised again
                self.channel.leave()
                return
            except (RuntimeError, OSError) as error:  # the process is ending
                _log.debug("%s", error)
                return
            with self._lock:
                if number != self.round.number:
                    continue
                self.regroup_wanted = state.regroup
                self.waiting = frozenset(state.waiting)
                self._lost.update(state.gone)
            if state.broken:
                self.channel.leave()

    def _explain(self, channel: CollectiveChannel, lost: int | None, error: Exception) -> Exception:
        with self._lock:
            self.regroup_wanted = True
            if lost is not None and lost < len(self.round.members):
                self._lost.add(self.round.members[lost])
        return RankError(f"A collective of trainers was not completed: {error}.")


def ordered_sum(channel: CollectiveChannel, mine: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    """The sum of flat tensors of equal size: part i is one of those that rank ranks[i] has.

    mine: this rank's parts, in order. A collective; all ranks say the same `ranks`.

    Floating-point sums depend on their order. Here the order is that of the parts, however many ranks there
    are: the tensors are cut into a chunk for each rank. A rank gets its chunk of every part, adds them up in
    order, and sends the sum to all others. With one part on each rank these are as many bytes as a ring
    needs.
    """
    if len(mine) != ranks.count(channel.rank):
        raise ValueError(
            f"Expected {ranks.count(channel.rank)} parts of rank {channel.rank}, got {len(mine)}."
        )
    world, size = channel.world_size, len(mine[0]) if mine else 0
    if world == 1:
        return _added(mine)
    if not all(rank in ranks for rank in range(world)):
        size = int(channel.swap(torch.full((world, 1), size)).max())
    bounds = [size * rank // world for rank in range(world + 1)]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    chunk = sizes[channel.rank]
    send = [part[begin:end] for begin, end in pairwise(bounds) for part in mine]
    counts = [ranks.count(rank) for rank in range(world)]
    received = channel.exchange(
        torch.cat(send) if send else torch.empty(0),
        [len(mine) * size for size in sizes],
        [count * chunk for count in counts],
    )
    of_ranks = [
        list(torch.split(piece, chunk)) if chunk else []
        for piece in torch.split(received, [n * chunk for n in counts])
    ]
    ordered = [of_ranks[rank].pop(0) for rank in ranks] if chunk else []
    total = _added(ordered) if ordered else received.new_empty(0)
    return channel.exchange(total.repeat(world), [chunk] * world, sizes)


def _added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
