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

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from heapq import heapreplace
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from karvan.data.loading.position import Division
from karvan.data.loading.read_jobs import Order, ReadJob
from karvan.data.loading.shuffle import Block, ShufflePlan
from karvan.data.source import Split


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
        left = self._plan.records
        for division in self._earlier:
            shares = [share_records(left, rank, division.world_size) for rank in range(division.world_size)]
            left -= sum(_handed_out(division, rank, epoch, records) for rank, records in enumerate(shares))
        return share_records(left, self._rank, self._world)

    @property
    def first_whole_epoch(self) -> int:
        """The first epoch of which no earlier division has handed anything out."""
        positions = (position for division in self._earlier for position in division.positions.values())
        return max((position.epoch + 1 for position in positions), default=0)

    def _pieces(self, epoch: int) -> tuple[Piece, ...]:
        """The share, in the order in which it is handed out."""
        left = [Piece(block.number, 0, block.records) for block in self._plan.blocks(epoch)]
        for division in self._earlier:
            if division.reaches(epoch):
                left = _left(left, division, epoch)
        return tuple(deal(left, self._world)[self._rank])


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
    taken: list[Piece] = []
    while records and pieces:
        block, first, end = pieces.popleft()
        cut = min(end, first + records)
        taken.append(Piece(block, first, cut))
        if cut < end:
            pieces.appendleft(Piece(block, cut, end))
        records -= cut - first
    return taken


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
