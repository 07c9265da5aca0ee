"""Divides the records of an epoch over ranks.

Blocks (see `shuffle.py`) do not depend on the number of ranks; shares do. Entire blocks are dealt in order,
each to the rank that has the fewest records so far, for as long as no rank gets more than an equal share.
Equal blocks are thus dealt in turns, so that ranks advance through unshuffled data together. The few
remaining blocks, about one for each rank, are cut: every rank gets the range of their records that it is
missing. Shares therefore differ by one record at most, whatever the blocks are, and most blocks are read by
one rank only.

A job that resumes on another number of ranks deals what earlier divisions have not handed out in this way.
Positions in checkpoints depend on this: a change here needs a new version of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain, groupby, islice
from itertools import count as counted
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from karvan.data.loading.pipeline import ReadOutcome, ReadPlan
from karvan.data.loading.position import Division, Position, RankPosition, check_settings, state_of
from karvan.data.loading.read_jobs import Order, ReadJob
from karvan.data.loading.settings import ReadSettings
from karvan.data.loading.shuffle import MOST_RECORDS_PER_SPLIT, Block, ShufflePlan
from karvan.data.source import Split

_log = logging.getLogger("karvan.data")


class Piece(NamedTuple):
    """Records `first` to `end` of a block, counted in the order in which the block hands them out."""

    block: int
    first: int
    end: int


def share_records(records: int, rank: int, world: int) -> int:
    """How many of `records` records a rank gets.

    The first ranks get one more if they do not divide evenly, so that rank 0, which shows the progress of
    all, is among the longest.
    """
    return (records + world - 1 - rank) // world


def deal(pieces: Sequence[Piece], world: int) -> list[list[Piece]]:
    """Divide pieces, which are sorted, over ranks: disjoint, complete, and equal to within one record."""
    if world == 1:
        return [list(pieces)]
    total = count(pieces)
    least = total // world
    shares: list[list[Piece]] = [[] for _ in range(world)]
    fewest = [(0, rank) for rank in range(world)]  # a heap of (records so far, rank)
    dealt = 0
    for block, records in _runs_of_blocks(pieces):
        so_far, rank = fewest[0]
        if so_far + records > least:
            break
        heapreplace(fewest, (so_far + records, rank))
        shares[rank] += block
        dealt += len(block)
    rest = deque(islice(pieces, dealt, None))
    for so_far, rank in sorted(fewest, key=itemgetter(1)):
        shares[rank] += _take(rest, share_records(total, rank, world) - so_far)
    return shares


def _runs_of_blocks(pieces: Sequence[Piece]) -> Iterator[tuple[Sequence[Piece], int]]:
    """The pieces of each block together, and how many records they have."""
    begin = 0
    for at, (block, first, end) in enumerate(pieces, 1):
        if at == len(pieces) or pieces[at][0] != block:
            alone = at - begin == 1
            run = pieces[begin:at]
            yield run, end - first if alone else count(run)
            begin = at


def skip(pieces: Iterable[Piece], records: int) -> list[Piece]:
    """The pieces after this many records."""
    rest = deque(pieces)
    _take(rest, records)
    return list(rest)


def count(pieces: Iterable[Piece]) -> int:
    """The records of all pieces."""
    return sum(end - first for _, first, end in pieces)


class Shares:
    """The share of one rank in every epoch, in a division that follows the `earlier` ones."""

    def __init__(self, plan: ShufflePlan, earlier: Sequence[Division], rank: int, world: int) -> None:
        self._plan = plan
        self._earlier = earlier
        self._rank = rank
        self._world = world
        self.pieces = lru_cache(maxsize=2)(self._pieces)

    def records(self, epoch: int) -> int:
        """How many records the share has. This is arithmetic: it needs no blocks."""
        remaining = self._plan.records
        for division in self._earlier:
            shares = [
                share_records(remaining, rank, division.world_size) for rank in range(division.world_size)
            ]
            remaining -= sum(
                _handed_out(division, rank, epoch, records) for rank, records in enumerate(shares)
            )
        return share_records(remaining, self._rank, self._world)

    @property
    def first_whole_epoch(self) -> int:
        """The first epoch of which no earlier division has handed anything out."""
        positions = (position for division in self._earlier for position in division.positions.values())
        return max((position.epoch + 1 for position in positions), default=0)

    def _pieces(self, epoch: int) -> tuple[Piece, ...]:
        """The share, in the order in which it is handed out."""
        pieces = [Piece(block.number, 0, block.records) for block in self._plan.blocks(epoch)]
        for division in self._earlier:
            if division.reaches(epoch):
                pieces = _left(pieces, division, epoch)
        return tuple(deal(pieces, self._world)[self._rank])


def _left(pieces: Sequence[Piece], division: Division, epoch: int) -> list[Piece]:
    """The pieces of an epoch that a division had not handed out when it ended, sorted and joined."""
    rests = (
        skip(share, _handed_out(division, rank, epoch, count(share)))
        for rank, share in enumerate(deal(pieces, division.world_size))
    )
    joined: list[Piece] = []
    for piece in sorted(chain.from_iterable(rests)):
        if joined and joined[-1].block == piece.block and joined[-1].end == piece.first:
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(piece)
    return joined


def _handed_out(division: Division, rank: int, epoch: int, share: int) -> int:
    position = division.positions[rank]
    if epoch == position.epoch:
        return position.records
    return share if epoch < position.epoch else 0


def _take(pieces: deque[Piece], records: int) -> list[Piece]:
    """Remove this many records from the front, and return them."""
    chosen: list[Piece] = []
    while records and pieces:
        block, first, end = pieces.popleft()
        cut = min(end, first + records)
        chosen.append(Piece(block, first, cut))
        if cut < end:
            pieces.appendleft(Piece(block, cut, end))
        records -= cut - first
    return chosen


# From the pieces of a rank's share to jobs for threads.


def jobs_of(plan: ShufflePlan, epoch: int, pieces: Sequence[Piece]) -> Iterator[ReadJob]:
    """The jobs that hand out these pieces of an epoch, in order. Pieces of one block are read together."""
    blocks = plan.blocks(epoch)
    end = count(pieces)
    for number, group in groupby(pieces, key=itemgetter(0)):
        block, ranges = blocks[number], list(group)
        if plan.shuffle:
            records = count(ranges)
            end -= records
            order = partial(_order, plan, epoch, block, ranges)
            yield ReadJob(epoch, block.splits, records, order, last=not end)
            continue
        (split,) = block.splits  # of data that is not shuffled, a part of a block can be read by itself
        for _, first, stop in ranges:
            end -= stop - first
            part = Split(split.path, split.first + first, stop - first)
            yield ReadJob(epoch, (part,), part.count, last=not end)


def _order(plan: ShufflePlan, epoch: int, block: Block, ranges: Sequence[Piece]) -> Order:
    order = plan.order(epoch, block)
    return np.concatenate([order[first:end] for _, first, end in ranges])


# The plan of a loader of fixed shares.


class SharePlan(ReadPlan):
    """The share of a rank in every epoch, and the position in it: exactly after the batches handed out."""

    def __init__(self, settings: ReadSettings, rank: int, world_size: int) -> None:
        self._settings = settings
        self.order = ShufflePlan(
            settings.parts(),
            shuffle=settings.shuffle,
            seed=settings.seed,
            split_records=settings.split_records,
            group_records=settings.group_records,
        )
        self.buffer = min(self.order.split_records, MOST_RECORDS_PER_SPLIT)
        self.rank = rank
        self.world_size = world_size
        self._go_to((), RankPosition(), settings.epochs)
        self._warned = False

    def _go_to(self, earlier: tuple[Division, ...], position: RankPosition, until: int | None) -> None:
        self._earlier = earlier
        self._shares = Shares(self.order, earlier, self.rank, self.world_size)
        self.position = position
        self._until = until
        self._finished = False
        self._begun: dict[str, Any] | None = None  # where the iteration began that has not ended
        self._last_epoch = position.epoch

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        steps = self._settings.steps_per_epoch
        return self._last_epoch if steps is None else max(0, self.position.steps - 1) // steps

    @property
    def epoch_records(self) -> int:
        """This rank's share of an epoch of which nothing has been handed out."""
        return share_records(self.order.records, self.rank, self.world_size)

    @property
    def share(self) -> int:
        """How many records the share of the current epoch has."""
        return self._shares.records(self.position.epoch)

    def batches(self, records: int) -> int:
        """How many batches some records of an epoch make."""
        size = self._settings.batch_size
        return records // size if self._settings.drop_remainder else -(-records // size)

    @property
    def batches_left(self) -> int | None:
        """How many batches the current iteration still gives; None without end."""
        if self._until is None:
            return None
        if self._settings.steps_per_epoch is not None:
            return max(0, self._until * self._settings.steps_per_epoch - self.position.steps)
        whole = max(self._shares.first_whole_epoch, self.position.epoch + 1)  # it and all after it are equal
        unfinished = [
            self._shares.records(epoch) for epoch in range(self.position.epoch, min(whole, self._until))
        ]
        if unfinished:
            unfinished[0] -= self.position.records
        later = max(0, self._until - whole) * self.batches(self.epoch_records)
        return sum(map(self.batches, unfinished)) + later

    @property
    @override
    def most_batches(self) -> int | None:
        return None if self._settings.steps_per_epoch is None else self.batches_left

    def begin(self) -> None:
        """An iteration begins, or continues one that was left early."""
        if self._finished and self._until is not None and self._settings.epochs is not None:
            self._until += self._settings.epochs
        self._finished = False
        self._begun = self.state()
        self._warn_if_empty()

    @override
    def jobs(self) -> Iterator[ReadJob]:
        return self._remaining(self._shares, self.position)

    def _remaining(self, shares: Shares, position: RankPosition) -> Iterator[ReadJob]:
        """The remaining jobs of this rank; runs on the threads."""
        endless = self._until is None or self._settings.steps_per_epoch is not None
        if endless and not self.batches(self.epoch_records):
            raise ValueError(
                f"Rank {self.rank} of {self.world_size} must get at least one batch of "
                f"{self._settings.batch_size} from an epoch, but gets {self.epoch_records} records. Use more "
                "data, fewer ranks, or a smaller batch_size."
            )
        for epoch in counted(position.epoch) if endless else range(position.epoch, self._until or 0):
            handed_out = position.records if epoch == position.epoch else 0
            yield from jobs_of(self.order, epoch, skip(shares.pieces(epoch), handed_out))

    @override
    def handed_out(self, outcome: ReadOutcome) -> None:
        for receipt in outcome.receipts:
            self.position = self.position.after(receipt)
            self._last_epoch = receipt.epoch
        if outcome.batch is not None:
            self.position = self.position._replace(steps=self.position.steps + 1)
            return
        self._finished, self._begun = True, None
        if self._settings.steps_per_epoch is None and self._until is not None:  # the share may be empty
            self.position = self.position._replace(epoch=self._until, records=0)

    def state(self) -> dict[str, Any]:
        """The position of this rank, for JSON."""
        now = Division(self.world_size, {self.rank: self.position})
        return state_of(self.order.settings(), self._until, self._earlier, now)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position, of this rank or a merged one of all ranks."""
        check_settings(state, self.order.settings(), "the one to load")
        epochs, until = self._settings.epochs, state["until"]
        until = None if epochs is None or until is None else max(epochs, until)
        self._go_to(*Position.from_state(state).of_rank(self.rank, self.world_size), until)

    def restart(self) -> bool:
        """Go back to where an iteration began that was left early; whether there was one."""
        begun = self._begun
        if begun is not None:
            self.load_state(begun)
        return begun is not None

    def start(self, iteration: int, batches: int) -> None:
        """Go to the start of an iteration, each of which has so many batches."""
        epochs, steps = self._settings.epochs, self._settings.steps_per_epoch
        first = iteration * (epochs or 1)
        position = RankPosition(first, 0, iteration * batches)
        if steps is not None:
            position = RankPosition(0, 0, first * steps)
        self._go_to((), position, None if epochs is None else first + epochs)

    def _warn_if_empty(self) -> None:
        """Warn once why this rank gets no batch, if there is data."""
        records = self.epoch_records
        if self._warned or not self.order.records or self.batches(records):
            return
        self._warned = True
        if records:
            why = (
                f"it has {records} of {self.order.records} records, and drop_remainder drops them, because "
                f"they are fewer than batch_size={self._settings.batch_size}"
            )
        else:
            why = f"there are only {self.order.records} records, and each of the first ranks has one"
            if self.order.records == 1:
                why = "there is only 1 record, and the first rank has it"
        _log.warning("Rank %d of %d gets no batches: %s.", self.rank, self.world_size, why)
