"""`ElasticGroup`: a trainer among others that come and go.

The trainers of a round (`karvan/work/trainer_group.py`) have a channel between them, as ranks of a fixed
group have. When a member dies or leaves, or somebody joins, the round is over: collectives raise a RankError,
and `regroup` makes the channel of the next round, in the same process.

To the rest of the program such a trainer is alone: the connection that has the group is that of a single
process. Only elastic training knows of the others. Ranks are those of the current round; what must be known
for longer is known by the number of the member, which no other process gets.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from karvan.activity import TRAINERS, activity
from karvan.distributed.collectives import CollectiveChannel, GlooChannel, SharedMemoryChannel, keep_forever
from karvan.distributed.elastic.group_client import GroupClient, GroupRound
from karvan.distributed.elastic.program_calls import ProgramCalls
from karvan.distributed.errors import ChannelLeftError, RankError
from karvan.distributed.gloo_ports import closing_ports
from karvan.distributed.machine import machine_id
from karvan.native import NativeCoreError, _native
from karvan.torch_internals import PrefixStore, Store
from karvan.wire.errors import RefusedError

_log = logging.getLogger("karvan.distributed")

_POLL = 0.02  # seconds between two questions for the next round
_WATCH = 0.2  # seconds between two questions about the current one


class ElasticGroup:
    """The trainers that train together, as the master decides.

    store: where members meet. transport, timeout: see `kv.connect`.
    """

    def __init__(
        self, client: GroupClient, store: Store, *, transport: str = "auto", timeout: float = 300.0
    ) -> None:
        self._client = client
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
        return self._client.member

    @property
    def name(self) -> str:
        """That of the group, which its trainers share, whoever comes and goes."""
        return self._client.group

    @property
    def process(self) -> str:
        """Its name at the master."""
        return self._client.process

    def enter(self) -> str:
        """Get the number of this trainer; returns the name of the run."""
        return self._client.enter()

    def regroup(self) -> GroupRound:
        """Wait for the next round, and become a member of it.

        A RefusedError if the others have continued without this trainer.
        """
        self.channel.leave()
        with activity.waiting(TRAINERS):
            while True:
                with self._lock:
                    lost = set(self._lost)
                found = self._client.join(self.round.number, lost)
                if found is not None and self._enter(found):
                    return found
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
        self._client.settle(self.round.number)
        self.gone = set()

    def leave(self, within: float | None = None) -> None:
        """Leave the group for good; the others continue. within: see `GroupClient.leave`."""
        self.channel.leave()
        self._client.leave(within)
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
        self._client.close()

    # A new round

    def _enter(self, found: GroupRound) -> bool:
        """Make the channels of a round; whether that has worked, or the round was broken meanwhile."""
        rank, world = found.members.index(self.member), len(found.members)
        with self._lock:
            self.gone = (self.gone | set(self.round.members)) - set(found.members)
            self.round = found
            self.regroup_wanted = False
            self.waiting = frozenset()
            self._lost = set()
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="karvan-group", daemon=True)
            self._watcher.start()
        channel = CollectiveChannel("group") if world == 1 else self._make_channel(found, rank, world)
        if channel is None:
            return False
        self.channel = channel
        _log.info("Round %d: rank %d of %d.", found.number, rank, world)
        return True

    def _make_channel(self, found: GroupRound, rank: int, world: int) -> CollectiveChannel | None:
        board: _native.Board | None = None
        if self._transport != "network":
            try:
                board = _native.Board(rank, world)
            except (RuntimeError, OSError, NativeCoreError) as error:
                _log.info("Trainers communicate over the network: %s.", error)
        here = {"machine": machine_id(), "place": None if board is None else board.place}
        ranks = self._share(found, "places", here)
        if ranks is None:
            return None
        works = all(each["machine"] == here["machine"] and each["place"] for each in ranks)
        if works and board is not None:
            try:
                board.join([tuple(each["place"]) for each in ranks])
            except (RuntimeError, OSError) as error:
                _log.info("Trainers communicate over the network: %s.", error)
                works = False
        agreed = self._share(found, "memory", works)
        if agreed is None:
            return None
        if all(agreed) and board is not None:
            return SharedMemoryChannel("group", board, rank, world, self._timeout, self._explain)
        return self._network_channel(found, rank, world)

    def _network_channel(self, found: GroupRound, rank: int, world: int) -> CollectiveChannel | None:
        store = PrefixStore(f"group/{found.number}", self._store)
        try:
            with closing_ports():
                group: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            _log.info("Round %d was broken while it began: %s", found.number, error)
            return None
        keep_forever(group)  # destroying a group waits for its operations
        return GlooChannel("group", group, self._explain)

    def _share(self, found: GroupRound, what: str, value: Any) -> list[Any] | None:
        """The values of all members of a round; None if it was broken meanwhile."""
        rank = found.members.index(self.member)
        keys = [f"group/{found.number}/{what}/{each}" for each in range(len(found.members))]
        self._store.set(keys[rank], json.dumps(value))
        while not self._store.check(keys):
            with self._lock:
                if self.regroup_wanted and self._lost:
                    return None
            if self._client.watch(found.number).broken:
                return None
            time.sleep(_POLL)
        return [json.loads(self._store.get(key)) for key in keys]

    def _watch(self) -> None:
        """The thread: learns from the master what has happened to the round."""
        while not self._ended.wait(_WATCH):
            number = self.round.number
            try:
                state = self._client.watch(number)
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
