"""Ordered, bounded prefetching on threads.

```
 jobs ──► readers ──► pieces (in order, in readings) ──► batches (in order) ──► caller
                           preparers                         finishers
```

A *job* is a block of records to read, or a part of one. Readers take jobs in order, adjacent ones of a file
together as one *reading*, and fill it with large pieces; a reader holds at most one waiting block, besides
the one that it reads, of the same reading or of its next, and, if it is its turn, the one that batches are
cut from. Preparers run on a piece the steps that can be run for many batches at once (see `settings.py`).
Then batches are cut from the pieces. Usually that is all, and the caller does it; but if there are steps for
each batch, or batches go to a GPU, finishers cut in turns and run the steps in parallel, each batch with one
of `prefetch` tickets, which the caller returns by taking the batch.

An error is raised in the position of the data that it prevented: the caller gets every batch before it, then
the error. A piece that cannot be prepared is cut as it was read, so that the batch with the fault fails.
Closing wakes all threads; each ends at its next step. The pipeline does not depend on the origin of the jobs,
so another process could hand them out.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from karvan.activity import activity
from karvan.data.columns.missing_values import ValueChecks
from karvan.data.errors import DataError
from karvan.data.loading.rank_shares import MOST_RECORDS_PER_SPLIT, Receipt
from karvan.data.loading.settings import ReadSettings, Rows, split
from karvan.data.retry import RetryingSource
from karvan.data.source import Split
from karvan.devices import Check, ColumnCopies, CopyInFlight
from karvan.ragged import Batch, Entry

# Units of reading: jobs, their readings, and the pieces of a batch.

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


class Closed(Exception):  # noqa: N818 - not an error: it ends threads
    """The pipeline has been closed while a thread waited for it."""


# Threads on each of which torch uses one core.


def start(loops: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    """Run each loop on a separate thread.

    Torch would give each of them as many helpers as there are cores, and those of all would crowd out each
    other and the caller's. The number of helpers holds for the thread that sets it and, here unwanted, for
    threads that start afterwards: so it is set back when all have started.
    """
    started = threading.Barrier(len(loops) + 1)

    def run(loop: Callable[[], None]) -> None:
        torch.get_num_threads()  # a thread's first call takes over what holds for new threads
        torch.set_num_threads(1)
        started.wait()
        with suppress(Closed):
            loop()

    helpers = torch.get_num_threads()
    threads = [threading.Thread(target=run, args=(loop,), name="karvan-data", daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    started.wait()
    torch.set_num_threads(helpers)
    return threads


# `DeviceDelivery`: finished batches go to a GPU, on the threads that made them.
#
# The caller gets a batch whose copy may still be in flight: its stream waits for the copy, the caller does
# not. Checks of a batch, such as those of labels, run before the copy, because on the GPU they would wait
# for it.


class DeviceDelivery:
    """Checks batches and copies them to a GPU; several threads may send at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = ColumnCopies(device)
        self._checks: tuple[Check, ...] = ()

    @contextmanager
    def check(self, check: Check) -> Iterator[None]:
        """Within it, `check` is called with each batch before it is copied, and may raise."""
        before, self._checks = self._checks, (*self._checks, check)
        try:
            yield
        finally:
            self._checks = before

    def send(self, batch: Batch | Mapping[str, Entry]) -> CopyInFlight:
        """Check a batch and begin to copy it."""
        if isinstance(batch, tuple):
            raise TypeError(
                "With a device, a transform must give a mapping of names to columns, got a pair of features "
                "and labels: leave device out, and a Trainer copies it."
            )
        batch = batch if isinstance(batch, Batch) else Batch(batch)
        checks = self._checks
        for check in checks:
            check(batch)
        return self.copies.start(batch, checks)


def make_delivery(device: torch.device | None) -> DeviceDelivery | None:
    """How batches get to a GPU; None if they stay on the CPU."""
    return None if device is None else DeviceDelivery(device)


_WORTH_PREPARING = 16_384
"""Fewer records are joined first: the steps cost about as much for a few as for many."""


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """A batch, or None at the end, and how many records of which epochs it contains.

    copy: of a batch that goes to a GPU, until it is handed out.
    """

    batch: Batch | None
    receipts: list[Receipt]
    error: BaseException | None = None
    copy: CopyInFlight | None = None


class ReadPlan:
    """Which records are read, and what it means that batches of them are handed out."""

    buffer: int = MOST_RECORDS_PER_SPLIT
    """How many records of a reading may wait."""

    @property
    def most_batches(self) -> int | None:
        """How many batches are made at most; None: all."""
        return None

    def jobs(self) -> Iterator[ReadJob | None]:
        """The records to read, in order. They are taken on a thread, where it may wait."""
        raise NotImplementedError

    def handed_out(self, outcome: ReadOutcome) -> None:
        """The caller gets this batch, or has come to the end."""

    def close(self) -> None:
        """Nothing more is read."""


class Pipeline:
    """Threads that turn the jobs of a plan into batches in advance; `next()` returns them in order.

    checks: for missing values. delivery: how batches get to a GPU; by default as the settings have it.
    """

    def __init__(
        self,
        settings: ReadSettings,
        plan: ReadPlan,
        *,
        checks: ValueChecks | None = None,
        delivery: DeviceDelivery | None = None,
    ) -> None:
        self._retrying = RetryingSource(settings.source, settings.retry_seconds)
        self._read_split = self._retrying.read if checks is None else checks.reader(self._retrying)
        self._failed: list[tuple[Exception, Split]] = []  # what the source has raised
        self._plan = plan
        self._runs = runs(plan.jobs())
        self._steps = steps = settings.steps
        self._batch_size = settings.batch_size
        self._drop_remainder = settings.drop_remainder
        self._buffer = plan.buffer
        self._most_batches = plan.most_batches
        self._delivery = delivery or make_delivery(settings.device)
        self._finishes = bool(steps.on_batches) or self._delivery is not None
        workers, prefetch = settings.workers, settings.prefetch
        self._taking = threading.Lock()
        self._cutting = threading.Lock()
        # One lock; each kind of thread waits for what concerns it, so that others are not woken for nothing.
        # Garbage collection may close a pipeline on a thread that holds the lock.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)  # readers: fewer records wait
        self._unprepared = threading.Condition(self._lock)  # preparers: there is a piece to prepare
        self._ready = threading.Condition(self._lock)  # who cuts, and the caller: there is more to take
        self._returned = threading.Condition(self._lock)  # finishers: there is a ticket
        self._readings: deque[Reading] = deque()
        self._all_taken = False
        self._tickets = prefetch
        self._cut = 0
        self._outcomes: dict[int, ReadOutcome] = {}
        self._handed = 0
        self._ended = False
        self._closed = False
        self._threads: list[threading.Thread] = []  # an interrupt may come before they have started
        atexit.register(self.end_threads)
        self._threads = start(
            [self._read_loop] * workers
            + [self._prepare_loop] * (workers if steps.on_pieces else 0)
            + [self._finish_loop] * (min(workers, prefetch) if self._finishes else 0)
        )

    def __iter__(self) -> Iterator[Batch]:
        """All batches; the plan hears of each before the caller has it."""
        while (outcome := self.next()).batch is not None:
            self._plan.handed_out(outcome)
            activity.advance()
            yield outcome.batch
        self._plan.handed_out(outcome)

    def next(self) -> ReadOutcome:
        """The next batch, or an outcome without one at the end; raises the error that prevented it."""
        outcome = self._finished() if self._finishes else self._make(*self._cut_next())
        if outcome.error is not None:
            raise outcome.error
        if outcome.copy is not None:
            return replace(outcome, batch=outcome.copy.receive(), copy=None)
        return outcome

    def failed_split(self, error: BaseException) -> Split | None:
        """The split whose reading raised this error."""
        return next((split for number, split in self._failed if number is error), None)

    def _finished(self) -> ReadOutcome:
        with self._lock:
            self._wait(self._ready, lambda: self._handed in self._outcomes)
            outcome = self._outcomes.pop(self._handed)
            self._handed += 1
            self._tickets += 1
            self._returned.notify()
        return outcome

    def close(self) -> None:
        """End all threads, and do not wait for outages to end."""
        self._plan.close()
        self._retrying.close()
        self.end_threads()

    def end_threads(self) -> None:
        """End all threads. Those in the middle of a step get a second to finish it."""
        with self._lock:
            self._closed = True
            for condition in (self._room, self._unprepared, self._ready, self._returned):
                condition.notify_all()
        atexit.unregister(self.end_threads)
        deadline = time.monotonic() + 1
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection may run this on any thread
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _wait(self, condition: threading.Condition, ready: Callable[[], bool]) -> None:
        condition.wait_for(lambda: self._closed or ready())
        if self._closed:
            raise Closed

    def _read_loop(self) -> None:
        before: Reading | None = None
        while (reading := self._take_reading()) is not None:
            try:
                self._fill(reading, before)
            except Closed:
                raise
            except BaseException as error:
                reading.error = error
            with self._lock:
                reading.finished = True
                self._ready.notify_all()
                self._wait(self._room, lambda: reading.error is None)
            before = reading

    def _take_reading(self) -> Reading | None:
        with self._taking:
            try:
                jobs = None if self._closed or self._all_taken else next(self._runs, None)
                reading = None if jobs is None else Reading(jobs)
            except BaseException as error:
                reading = Reading(deque(), error=error, finished=True)
            with self._lock:
                self._all_taken = reading is None or reading.finished
                if reading is not None:
                    self._readings.append(reading)
                self._ready.notify_all()
                return None if self._all_taken else reading

    def _fill(self, reading: Reading, before: Reading | None) -> None:
        """Read its records; the first wait until those of the same thread's reading `before` are in use."""
        for records in grouped(self._records(list(reading.jobs)), min(_WORTH_PREPARING, self._buffer)):
            ready = not self._steps.on_pieces
            self._put(reading, before, ReadPiece(records, len(records), claimed=ready, ready=ready))
            del records  # they may have been used up before the next ones come

    def _records(self, jobs: list[ReadJob]) -> Iterator[pa.RecordBatch]:
        """The records of neighbouring jobs, in their order."""
        splits = jobs[0].splits
        if len(jobs) > 1:
            last = jobs[-1].splits[0]
            splits = (Split(last.path, splits[0].first, last.first + last.count - splits[0].first),)
        if jobs[0].order is None:
            yield from self._read(splits[0])
            return
        batches = (batch for split in splits for batch in self._read(split))
        blocks = regrouped(batches, [job.reads for job in jobs])
        for job in jobs:
            assert job.order is not None
            # No variable for the block: it would hold the memory while the next one is read.
            yield next(blocks).take(pa.array(job.order()))
        next(batches, None)  # lets the count of the last split be checked

    def _read(self, split: Split) -> Iterator[pa.RecordBatch]:
        received = 0
        try:
            for batch in self._read_split(split):
                if self._closed:
                    raise Closed
                received += len(batch)
                if received > split.count:
                    break
                if len(batch):
                    yield batch
        except Exception as error:
            self._failed.append((error, split))
            raise
        if received != split.count:
            came = "more" if received > split.count else str(received)
            detail = f"expected {split.count} records, as there were when they were counted, but {came} came"
            raise DataError(detail, path=split.path, place=f"from record {split.first} on")

    def _put(self, reading: Reading, before: Reading | None, piece: ReadPiece) -> None:
        with self._lock:
            self._wait(self._room, lambda: before is None or not before.buffered)
            self._wait(
                self._room, lambda: not reading.buffered or reading.buffered + piece.records <= self._buffer
            )
            reading.pieces.append(piece)
            reading.buffered += piece.records
            if piece.ready:
                self._ready.notify_all()
            else:
                self._unprepared.notify()

    def _prepare_loop(self) -> None:
        while True:
            with self._lock:
                self._wait(self._unprepared, lambda: self._next_unprepared() is not None)
                piece = self._next_unprepared()
                assert piece is not None
                piece.claimed = True
            with suppress(BaseException):  # the batch with the fault will raise it again
                piece.rows = self._steps.prepare(piece.rows)
            with self._lock:
                piece.ready = True
                self._ready.notify_all()

    def _next_unprepared(self) -> ReadPiece | None:
        pieces = (piece for reading in self._readings for piece in reading.pieces)
        return next((piece for piece in pieces if not piece.claimed), None)

    def _finish_loop(self) -> None:
        while True:
            with self._lock:
                self._wait(self._returned, lambda: self._tickets > 0)
                self._tickets -= 1
            with self._cutting:
                if self._ended:
                    return
                number = self._cut
                parts, receipts, error = self._cut_next()
                self._ended = error is not None or not parts
            outcome = self._make(parts, receipts, error)
            self._ended |= outcome.error is not None
            with self._lock:
                self._outcomes[number] = outcome
                self._ready.notify_all()

    def _make(self, parts: list[Rows], receipts: list[Receipt], error: BaseException | None) -> ReadOutcome:
        batch: Batch | None = None
        copy: CopyInFlight | None = None
        if error is None and parts:
            try:
                output = self._steps.finish(parts)
                batch, copy = (
                    (output, None) if self._delivery is None else (None, self._delivery.send(output))
                )
            except BaseException as failure:
                error = failure
        return ReadOutcome(batch, receipts, error, copy)

    def _cut_next(self) -> tuple[list[Rows], list[Receipt], BaseException | None]:
        """The rows of the next batch; none at the end; or the error that prevented it."""
        parts: list[Rows] = []
        receipts: list[Receipt] = []
        missing = self._batch_size if self._cut != self._most_batches else 0
        self._cut += 1
        try:
            while missing and (reading := self._next_reading()) is not None:
                count, rows, pieces, last = reading.take(missing, self._batch_size)
                parts.append(rows)
                receipts += pieces
                missing -= count
                if not reading.pieces[0].cuts:
                    self._drop_used(reading)
                if last and missing and self._drop_remainder:
                    parts, missing = [], self._batch_size
                elif last:
                    break
        except Closed:
            raise
        except BaseException as error:  # the caller would wait forever if it ended a finisher
            return [], [], error
        return parts, receipts, None

    def _next_reading(self) -> Reading | None:
        """The reading that the next rows come from, when they can be cut; None at the end."""
        with self._lock:
            while True:
                self._wait(self._ready, lambda: bool(self._readings) or self._all_taken)
                if not self._readings:
                    return None
                reading = self._readings[0]
                self._wait(self._ready, reading.can_continue)
                if reading.pieces:
                    # Where finishers hold batches, the room for them is that of the piece they are cut from.
                    if not self._finishes and reading.release():
                        self._room.notify_all()
                    return reading
                if reading.error is not None:
                    raise reading.error
                self._readings.popleft()

    def _drop_used(self, reading: Reading) -> None:
        with self._lock:
            reading.release()
            reading.pieces.popleft()
            if reading.finished and not reading.pieces and reading.error is None:
                self._readings.popleft()
            self._room.notify_all()
