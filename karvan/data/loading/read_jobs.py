"""Units of reading: jobs, their readings, and the pieces of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from karvan.data.loading.batch_steps import Rows, split
from karvan.data.loading.position import Receipt
from karvan.data.source import Split

_MOST_RECORDS = 1 << 20  # of a reading

Order = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Records of an epoch to hand out: all of the splits, or those of a block that `order` chooses."""

    epoch: int
    splits: tuple[Split, ...]
    records: int
    """How many are handed out."""
    order: Callable[[], Order] | None = None
    """Returns the indices of the records to take from the block, in order; None: all records."""
    last: bool = False
    """Whether it is the last of its epoch: batches do not span epochs."""

    @property
    def reads(self) -> int:
        """How many records are read."""
        return sum(split.count for split in self.splits)


@dataclass(slots=True, eq=False)
class ReadPiece:
    """Records that were read together. They are prepared, then cut into batches."""

    rows: Rows
    records: int
    claimed: bool = False
    """Whether a thread prepares it, or nothing is left to prepare."""
    ready: bool = False
    """Whether it can be cut."""
    waits: bool = True
    """Whether it counts as prefetched; one that batches are cut from does not."""
    cuts: deque[tuple[int, Rows]] = field(default_factory=deque)

    def cut(self, first: int, size: int) -> None:
        """Cut it into up to `first` rows, then into runs of `size`, of which the last may be shorter."""
        whole, rest = divmod(max(self.records - first, 0), size)
        counts = [min(first, self.records), *[size] * whole, *[rest] * (rest > 0)]
        self.cuts.extend(zip(counts, split(self.rows, counts), strict=True))


@dataclass(slots=True, eq=False)
class Reading:
    """Jobs that are read together, and the pieces that have been read but not been used."""

    jobs: deque[ReadJob]
    pieces: deque[ReadPiece] = field(default_factory=deque)
    buffered: int = 0
    """Records that wait."""
    finished: bool = False
    error: BaseException | None = None

    def can_continue(self) -> bool:
        """Whether its next rows can be cut, or it has ended."""
        return self.pieces[0].ready if self.pieces else self.finished

    def release(self) -> bool:
        """Mark the first piece as no longer waiting; returns whether it was waiting."""
        piece = self.pieces[0]
        waited, piece.waits = piece.waits, False
        self.buffered -= piece.records if waited else 0
        return waited

    def take(self, missing: int, batch_size: int) -> tuple[int, Rows, list[Receipt], bool]:
        """Up to `missing` rows of the first piece, their receipts, and whether an epoch ends with them."""
        piece = self.pieces[0]
        if not piece.cuts:
            piece.cut(missing, batch_size)
        count, rows = piece.cuts.popleft()
        receipts, remaining, last = [], count, False
        while remaining:
            job = self.jobs.popleft()
            handed = min(remaining, job.records)
            remaining -= handed
            rest = job.records - handed
            if rest:
                self.jobs.appendleft(ReadJob(job.epoch, (), rest, None, job.last))
            last = job.last and not rest
            receipts.append(Receipt(job.epoch, handed, last))
        return count, rows, receipts, last

    def is_used(self) -> bool:
        """Whether all rows of the first piece have been taken."""
        return not self.pieces[0].cuts


def grouped(batches: Iterator[pa.RecordBatch], least: int) -> Iterator[pa.RecordBatch]:
    """The same records in batches of at least `least`; before an error, the records read so far."""
    parts: list[pa.RecordBatch] = []
    try:
        for batch in batches:
            parts.append(batch)
            del batch  # so that it is released with the others
            if sum(map(len, parts)) >= least:
                yield joined(parts)
    except BaseException:
        if parts:
            yield joined(parts)
        raise
    if parts:
        yield joined(parts)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all, which are released; a single one is not copied."""
    batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    batches.clear()
    return batch


def regrouped(batches: Iterator[pa.RecordBatch], counts: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """The same records in batches of the given counts."""
    rest: pa.RecordBatch | None = None
    for count in counts:
        parts: list[pa.RecordBatch] = []
        while count:
            rest = next(batches) if rest is None else rest
            size = min(count, len(rest))
            parts.append(rest.slice(0, size))
            rest = rest.slice(size) if size < len(rest) else None
            count -= size
        yield joined(parts)


def runs(jobs: Iterator[ReadJob | None]) -> Iterator[deque[ReadJob]]:
    """Jobs, grouped where they are adjacent in a file: their row groups are then decoded once.

    None between two jobs keeps them apart; the first does not wait for the second, which may take long.
    """
    run: deque[ReadJob] = deque()
    held_records = 0
    for job in jobs:
        if run and not (
            job is not None and _follows(run[-1], job) and held_records + job.reads <= _MOST_RECORDS
        ):
            yield run
            run, held_records = deque(), 0
        if job is not None:
            run.append(job)
            held_records += job.reads
    if run:
        yield run


def _follows(before: ReadJob, job: ReadJob) -> bool:
    if len(before.splits) > 1 or len(job.splits) > 1 or before.epoch != job.epoch:
        return False
    end, start = before.splits[0], job.splits[0]
    return end.path == start.path and end.first + end.count == start.first
