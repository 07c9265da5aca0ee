"""What is read: jobs, the readings that they are read in, and the pieces of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from karvan.data.position import Receipt
from karvan.data.source import Split

MOST_RECORDS_PER_READING = 1 << 20

Order = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Job:
    """A block of an epoch to hand out, from its record number `skip` on."""

    epoch: int
    block: int
    splits: tuple[Split, ...]
    records: int
    skip: int = 0
    order: Callable[[], Order] | None = None
    """Gives the permutation of the block's records; None: as they are."""
    last: bool = False
    """Whether it is the last of its epoch: batches do not span epochs."""


@dataclass(slots=True)
class Piece:
    """Records, in the given order or, without one, as they are."""

    data: pa.RecordBatch
    order: Order | None = None

    @property
    def records(self) -> int:
        """How many they are."""
        return len(self.data) if self.order is None else len(self.order)

    def cut(self, first: int, count: int) -> Piece:
        """Some of them; nothing is copied."""
        if self.order is None:
            return Piece(self.data.slice(first, count))
        return Piece(self.data, self.order[first : first + count])

    def rows(self) -> pa.RecordBatch:
        """The records in their order."""
        return self.data if self.order is None else self.data.take(pa.array(self.order))


@dataclass(slots=True, eq=False)
class Reading:
    """Jobs that are read in one go, and what has been read of them but not been used."""

    jobs: deque[Job]
    pieces: deque[Piece] = field(default_factory=deque)
    buffered: int = 0
    finished: bool = False
    error: BaseException | None = None

    def take(self, count: int) -> tuple[Piece, list[Receipt], bool]:
        """Up to `count` records of the first piece, their receipts, and whether an epoch ends with them."""
        piece = self.pieces.popleft()
        if piece.records > count:
            self.pieces.appendleft(piece.cut(count, piece.records - count))
            piece = piece.cut(0, count)
        self.buffered -= piece.records
        receipts, left, last = [], piece.records, False
        while left:
            job = self.jobs.popleft()
            handed = min(left, job.records - job.skip)
            left -= handed
            rest = Job(job.epoch, job.block, (), job.records, job.skip + handed, None, job.last)
            complete = rest.skip == rest.records
            receipts.append(Receipt(job.epoch, job.block, rest.skip, complete))
            if not complete:
                self.jobs.appendleft(rest)
            last = complete and job.last
        return piece, receipts, last


def concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all; a single one is not copied."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def regrouped(batches: Iterator[pa.RecordBatch], counts: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """The same records in batches of the given counts."""
    rest: pa.RecordBatch | None = None
    for count in counts:
        held: list[pa.RecordBatch] = []
        while count:
            batch = next(batches) if rest is None else rest
            held.append(batch.slice(0, count))
            count -= len(held[-1])
            rest = batch.slice(len(held[-1])) if len(batch) > len(held[-1]) else None
        yield concatenated(held)


def runs(jobs: Iterator[Job]) -> Iterator[deque[Job]]:
    """Jobs, those that are neighbours in a file together: their row groups are then decoded once."""
    run: deque[Job] = deque()
    held = 0
    for job in jobs:
        if run and not (_follows(run[-1], job) and held + job.records <= MOST_RECORDS_PER_READING):
            yield run
            run, held = deque(), 0
        run.append(job)
        held += job.records
    if run:
        yield run


def _follows(before: Job, job: Job) -> bool:
    if len(before.splits) > 1 or len(job.splits) > 1 or job.skip or before.epoch != job.epoch:
        return False
    end, start = before.splits[0], job.splits[0]
    return end.path == start.path and end.first + end.count == start.first
