"""`from_loaders`: the batches that a job's loaders read, for a trainer.

For each loader a trainer has a few calls of `next` in flight; an answer that was not taken yet counts as one
of them, so a slow trainer asks for nothing, and the loader's queue fills up.
`karvan/cluster/loader/epoch_service.py` has the protocol, and what happens when a process dies. A trainer
looks for a lost loader until `timeout` has passed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from typing_extensions import override

from karvan import distributed, ragged
from karvan.argument_checks import check_counts
from karvan.cluster import loader_channel
from karvan.cluster.batch_messages import unpack
from karvan.cluster.loader.service import BatchName, ask_loaders, require_ids
from karvan.cluster.loader_access import BatchStream, LoaderAccess, waiting_for
from karvan.cluster.loader_channel import ChannelSettings, LoaderChannel, leave_all
from karvan.cluster.task_stream import LoadedData
from karvan.data.identity import Identity
from karvan.data.read import is_leased
from karvan.discovery.directory import Addresses, StaticDirectory, directory_from_environment
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.protocol.loader import DONE, IDENTITY, STATISTICS, References
from karvan.ragged import REFERENCE, Batch
from karvan.wire import Security

_log = logging.getLogger("karvan.cluster")

_FOUND_WITHIN = 5.0  # seconds; a caller that finds no loader tries again until its deadline
_FOUND_SOON = 0.5  # seconds; of tasks that another loader can read


class LoadedBatch(Batch):
    """A batch and where it comes from: its number in the epoch, and what its loader sent along (`meta`)."""

    epoch = 0
    number = 0
    meta: Any = None

    @override
    def with_entries(self, entries: Mapping[str, Any]) -> LoadedBatch:
        """Other entries, with the same origin."""
        batch = LoadedBatch.trusted(dict(entries), self.samples)
        batch.epoch, batch.number, batch.meta = self.epoch, self.number, self.meta
        return batch


def from_loaders(
    *,
    ordered: bool | None = None,
    prefetch: int = 4,
    timeout: float = 300.0,
    ids: Sequence[str] | None = None,
    loaders: int | Sequence[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> LoaderStream | LoadedData:
    """Receive the batches that the job's loaders read for this trainer.

    One iteration is one epoch.

    In a job with `sharding: dynamic`, `Trainer.fit` leases the records from the job's master, and has loaders
    read them. Batches then come as they are ready; with `global_batches`, in the order of the epoch.

    Args:
        ordered: Whether batches come by their numbers, so that a run can be repeated, which is the default;
            otherwise as they are ready. Not for `sharding: dynamic`.
        prefetch: How many batches are requested from each loader in advance.
        timeout: How many seconds to wait for a loader that is lost.
        ids: The features that embedding workers look up. A job that has workers must name them, or say
            `ids=[]` to have the ids in the batches.
        loaders: How many loaders there are, or their addresses; by default those of the launched job.
        rank: Which trainer this is; by default that of `kv.connect`. Not for `sharding: dynamic`.
        world_size: How many trainers there are; by default that of `kv.connect`. Not for `sharding: dynamic`.

    Returns:
        An iterable of batches with a position.

    Raises:
        ValueError: An argument is out of range, or is not for `sharding: dynamic`.

    Example:
        >>> def main(trainer):  # in a job with loaders
        ...     trainer.fit(kv.data.from_loaders(), epochs=3)
    """
    if is_leased():
        settings = {"ordered": ordered, "rank": rank, "world_size": world_size}
        if names := [name for name, value in settings.items() if value is not None]:
            raise ValueError(
                "sharding: dynamic has trainers lease their records, in an order of their own: expected no "
                f"ordered, rank and world_size, got {', '.join(names)}."
            )
        check_counts(1, prefetch=prefetch)
        security = Security.from_environment()
        given_directory, count = _directory_of(loaders)
        directory = given_directory or directory_from_environment(security=security)
        find = partial(directory.find, Role.LOADER, timeout=_FOUND_SOON)
        return LoadedData(LoaderAccess(count, find, security, timeout), prefetch, ids)
    return LoaderStream(ordered is not False, prefetch, timeout, ids, loaders, rank, world_size)


def _directory_of(loaders: int | Sequence[str] | None) -> tuple[StaticDirectory | None, int]:
    """The directory of loaders whose addresses are given, and how many there are."""
    directory = None
    if loaders is None:
        loaders = JobEnvironment.read().counts.get(Role.LOADER, 0)
    elif not isinstance(loaders, int):
        directory = StaticDirectory({Role.LOADER: list(loaders)})
        loaders = len(loaders)
    if loaders < 1:
        raise ValueError("A stream expects loaders: a job that has some (KARVAN_LOADER_COUNT), or addresses.")
    return directory, loaders


class LoaderStream(BatchStream[LoaderChannel]):
    """The batches of loaders; an iteration that was left early continues in the next one."""

    epoch: int
    """The epoch of the last batch, from 0."""
    _finished: bool  # whether the epoch was read to its end, so that the next one follows

    def __init__(
        self,
        ordered: bool,
        prefetch: int,
        timeout: float,
        ids: Sequence[str] | None,
        loaders: int | Sequence[str] | None,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, got {prefetch}.")
        super().__init__()
        self._ordered = ordered
        self._prefetch = prefetch
        self._timeout = timeout
        self._ids = ids
        require_ids(ids)
        self._placement = rank, world_size  # None: as connected
        self._directory: Addresses | None
        self._directory, count = _directory_of(loaders)
        self._digest: str | None = None  # of the loaders' statistics, if they were requested
        self._released: deque[ragged.IdsReference] = deque()  # whose ids are not needed any more
        self._channels: list[LoaderChannel] = []
        weakref.finalize(self, leave_all, self._channels).atexit = False  # connections end with the process
        self._go_to(0, loader_channel.start_of_epoch(count), (0, 1))

    def __iter__(self) -> Iterator[LoadedBatch]:
        if self._finished:
            self._finished = False
            self.epoch += 1
            for channel in self._channels:
                channel.next_epoch()
        require_ids(self._ids)  # the job may have been connected since
        caller = self._connect()
        workers = distributed.current().workers
        if workers is not None:
            workers.resend, workers.release = self._resend, self._released.append
        for channel in self._channels:
            channel.ask()
        for channel in (
            self._by_number(caller.rank, caller.world_size) if self._ordered else self._by_arrival()
        ):
            yield self._take(channel)
        self._finished = True

    def close(self) -> None:
        """Disconnect from the loaders; iterating again reconnects."""
        rank, _ = placement = self._own_placement()
        states = [channel.state(rank) for channel in self._channels]
        self._go_to(self.epoch, states, placement, self._finished)
        if self._directory is not None:
            self._directory.close()

    def state_dict(self) -> dict[str, Any]:
        """The position of this trainer, for JSON: after all batches that were handed out."""
        rank, world = self._own_placement()
        return loader_channel.state_of(
            self.epoch, world, [rank], [channel.state(rank) for channel in self._channels]
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: this trainer's own, or the merged one of any number of trainers."""
        loader_channel.check(state, len(self._channels))
        rank, world = self._own_placement()
        merged = len(state["ranks"]) == state["trainers"]
        if not merged and (state["trainers"] != world or rank not in state["ranks"]):
            raise ValueError(
                f"Trainer {rank} of {world} expects its own state or the merged one of all, "
                f"got the state of {state['ranks']} of {state['trainers']}."
            )
        if not self._finished and state == self.state_dict():
            return
        if merged:
            state = loader_channel.merge([state])
        self._go_to(int(state["epoch"]), state["loaders"], (rank, world))

    def start_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch, by its number from 0."""
        self._go_to(epoch, loader_channel.start_of_epoch(len(self._channels)), self._own_placement())

    def merge(self, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Join the states of all trainers into one that any number of them can continue from."""
        return loader_channel.merge(states)

    def identity(self) -> Identity | None:
        """The identity of the loaders' data; if they have none, that of the job's `data` section."""
        self._connect()
        states = [channel.answer(IDENTITY).head.identity for channel in self._channels]
        first = states[0]
        if first is not None and all(state == first for state in states):
            return Identity.from_state(first)
        data = JobEnvironment.read().data
        if None in states and not data:
            return None
        ids = {state["id"] for state in states if state is not None}
        text = json.dumps([data or None, sorted(ids)])
        return Identity(hashlib.sha256(text.encode()).hexdigest()[:16], "the data of the job")

    def transform_states(self) -> dict[str, Any]:
        """The statistics of the loaders' transforms, by name; a Trainer saves them in checkpoints.

        Loaders with different statistics are an error, also later, when one is replaced.
        """
        self._connect()
        states, self._digest = ask_loaders(
            lambda loader, whole: self._channels[loader].answer(STATISTICS, whole), range(len(self._channels))
        )
        return states

    def _go_to(
        self,
        epoch: int,
        states: Sequence[Mapping[str, Any]],
        placement: tuple[int, int],
        finished: bool = False,
    ) -> None:
        """Begin an epoch at these states of loaders."""
        leave_all(self._channels)
        self.epoch, self._finished = epoch, finished
        self._channels[:] = [
            LoaderChannel(loader, self._changed, epoch, state, (*placement, len(states)))
            for loader, state in enumerate(states)
        ]

    def _resend(self, ids: ragged.IdsReference) -> None:
        reference = BatchName.named(ids.name)
        channel = self._channels[reference.number % len(self._channels)]
        self._check_statistics(channel, channel.resend(reference, ids.worker))

    def _release(self) -> None:
        """Tell the loaders which ids they may release."""
        by_loader: dict[int, list[BatchName]] = {}
        while self._released:
            reference = BatchName.named(self._released.popleft().name)
            by_loader.setdefault(reference.number % len(self._channels), []).append(reference)
        for loader, references in by_loader.items():
            self._channels[loader].call(DONE, References(references=references))

    def _own_placement(self) -> tuple[int, int]:
        """This trainer's rank, and the number of trainers."""
        connection = distributed.current()
        rank, world = connection.rank, connection.world_size
        job = JobEnvironment.read()
        if world == 1 and job.role == Role.TRAINER:
            rank, world = job.index, job.count
        rank = rank if self._placement[0] is None else self._placement[0]
        world = world if self._placement[1] is None else self._placement[1]
        if not 0 <= rank < world:
            raise ValueError(f"A stream expects a rank below world_size, got {rank} of {world}.")
        return rank, world

    def _connect(self) -> ChannelSettings:
        """Have the channels connect as the trainer that this process is now."""
        rank, world = self._own_placement()
        security = Security.from_environment()
        if self._directory is None:
            self._directory = directory_from_environment(security=security)
        find = partial(self._directory.find, Role.LOADER, timeout=_FOUND_WITHIN)
        access = LoaderAccess(len(self._channels), find, security, self._timeout)
        generation = JobEnvironment.read().generation
        caller = ChannelSettings(rank, world, generation, list(self._ids or ()), self._prefetch, access)
        for channel in self._channels:
            channel.caller = caller
        return caller

    def _by_number(self, rank: int, world: int) -> Iterator[LoaderChannel]:
        count = len(self._channels)
        mine = [
            channel for channel in self._channels if (channel.loader - rank) % math.gcd(count, world) == 0
        ]
        first = min(channel.first * count + channel.loader for channel in mine)
        number = rank + max(0, -(-(first - rank) // world)) * world
        while not all(channel.end is not None and number // count >= channel.end[0] for channel in mine):
            channel, index = self._channels[number % count], number // count
            if channel.wants(index) and self._ready([channel]):
                if channel.waiting[0].head.index != index:
                    raise RuntimeError(
                        f"{channel.name} expected to give its batch {index} of epoch {self.epoch}, "
                        f"got {channel.waiting[0].head.index}."
                    )
                yield channel
            number += world
        for channel in self._channels:
            self._ready([channel])  # the others have no batch for this trainer, only an end

    def _by_arrival(self) -> Iterator[LoaderChannel]:
        while channels := self._ready(self._channels):
            yield min(channels, key=lambda channel: channel.waiting[0].head.index)

    @override
    def _wait_for(self, sources: Sequence[LoaderChannel]) -> AbstractContextManager[Callable[[], float]]:
        def awaited() -> list[LoaderChannel]:
            return [channel for channel in sources if not channel.waiting and not channel.ended]

        def warn(seconds: float) -> None:
            names = ", ".join(channel.name for channel in awaited())
            _log.warning("No batch of epoch %d from %s for %.0f seconds.", self.epoch, names, seconds)

        return waiting_for([channel.loader for channel in awaited()], warn)

    def _take(self, channel: LoaderChannel) -> LoadedBatch:
        (head, arrays, _), reference = channel.take()
        self._check_statistics(channel, head.statistics)
        entries: dict[str, Any] = dict(unpack(head.batch, arrays))
        if reference is not None:
            entries[REFERENCE] = reference
            self._release()
        batch = LoadedBatch.trusted(entries, head.rows)
        batch.epoch, batch.meta = self.epoch, head.meta
        batch.number = head.index * len(self._channels) + channel.loader
        return batch

    def _check_statistics(self, channel: LoaderChannel, digest: str) -> None:
        """Raise if a loader that replaces another has other statistics than when training started."""
        if self._digest is not None and digest != self._digest:
            raise ValueError(
                f"{channel.name} transforms batches with other statistics than when training started: its "
                "process was replaced, and fitted its engine to data that has changed. Expected the same "
                "statistics. Name the folder of checkpoints in the job (checkpoints), so that data.read "
                "of the loader program loads them, or fit to data that does not change."
            )
