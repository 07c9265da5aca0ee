"""Reading ahead on threads, in order and within bounds.

```
 jobs ──► readers ──► readings (in order, one per reader) ──► decoders ──► outcomes (in order) ──► caller
```

A *job* is a block of records to read, or the rest of one. Readers take jobs in order, neighbours in a file
together as one *reading*, and fill it with Arrow data; a reader keeps at most one block waiting, next to the
one that it reads, and begins the next reading when its last has been used up. Decoders take turns to cut the
readings into batches, then decode side by side. A batch needs one of `prefetch` tickets; the caller gives it
back by taking the batch.

An error takes the place of the data that it prevented: the caller gets every batch before it, then the
error. Closing wakes all threads; each ends at its next step. Nothing in here knows who the jobs come from,
so they may as well be handed out by another process.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from karvan.data.errors import DataError
from karvan.data.position import Receipt
from karvan.data.reading import Job, Piece, Reading, concatenated, regrouped, runs
from karvan.data.source import Source, Split

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """A batch, or nothing at the end, with what it takes from which blocks."""

    batch: T | None
    receipts: list[Receipt]
    error: BaseException | None = None


class Closed(Exception):  # noqa: N818 - not an error: it ends threads
    """The pipeline has been closed while somebody waited for it."""


class Pipeline(Generic[T]):
    """Threads that turn jobs into batches ahead of the caller; `next()` gives them in order."""

    def __init__(
        self,
        source: Source,
        jobs: Iterator[Job],
        decode: Callable[[pa.RecordBatch], T],
        *,
        batch_size: int,
        drop_remainder: bool,
        workers: int,
        prefetch: int,
        buffer: int,
        most_batches: int | None = None,
    ) -> None:
        self._source = source
        self._runs = runs(jobs)
        self._decode = decode
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._buffer = buffer
        self._most_batches = most_batches
        self._taking = threading.Lock()
        self._cutting = threading.Lock()
        self._changed = threading.Condition()
        self._readings: deque[Reading] = deque()
        self._all_taken = False
        self._tickets = prefetch
        self._cut = 0
        self._outcomes: dict[int, Outcome[T]] = {}
        self._handed = 0
        self._ended = False
        self._closed = False
        loops = [self._read_loop] * workers + [self._decode_loop] * min(workers, prefetch)
        self._threads = [threading.Thread(target=loop, name="karvan-data", daemon=True) for loop in loops]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def next(self) -> Outcome[T]:
        """The next batch, or an outcome without one at the end; raises what a thread has met in its place."""
        with self._changed:
            self._wait(lambda: self._handed in self._outcomes)
            outcome = self._outcomes.pop(self._handed)
            self._handed += 1
            self._tickets += 1
            self._changed.notify_all()
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def close(self) -> None:
        """End all threads. Those that are in the middle of something get a second to finish it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        deadline = time.monotonic() + 1
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection may run this on any thread
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._closed or ready())
        if self._closed:
            raise Closed

    def _read_loop(self) -> None:
        try:
            while (reading := self._take_reading()) is not None:
                try:
                    self._fill(reading)
                except Closed:
                    raise
                except BaseException as error:
                    reading.error = error
                with self._changed:
                    reading.finished = True
                    self._changed.notify_all()
                    self._wait(lambda: reading not in self._readings)
        except Closed:
            pass

    def _take_reading(self) -> Reading | None:
        with self._taking:
            try:
                jobs = None if self._closed or self._all_taken else next(self._runs, None)
                reading = None if jobs is None else Reading(jobs)
            except BaseException as error:
                reading = Reading(deque(), error=error, finished=True)
            with self._changed:
                self._all_taken = reading is None or reading.finished
                if reading is not None:
                    self._readings.append(reading)
                self._changed.notify_all()
                return None if self._all_taken else reading

    def _fill(self, reading: Reading) -> None:
        jobs = list(reading.jobs)
        splits = jobs[0].splits
        if len(jobs) > 1:
            last = jobs[-1].splits[0]
            splits = (Split(last.path, splits[0].first, last.first + last.count - splits[0].first),)
        if jobs[0].order is None:
            skip, split = jobs[0].skip, splits[0]
            for batch in self._read(Split(split.path, split.first + skip, split.count - skip)):
                self._put(reading, Piece(batch))
            return
        batches = (batch for split in splits for batch in self._read(split))
        for job, block in zip(jobs, regrouped(batches, [job.records for job in jobs]), strict=True):
            assert job.order is not None
            self._put(reading, Piece(block, job.order()[job.skip :]))
        next(batches, None)  # lets the count of the last split be checked

    def _read(self, split: Split) -> Iterator[pa.RecordBatch]:
        received = 0
        for batch in self._source.read(split):
            if self._closed:
                raise Closed
            received += len(batch)
            if received > split.count:
                break
            if len(batch):
                yield batch
        if received != split.count:
            came = "more" if received > split.count else str(received)
            detail = f"expected {split.count} records, as there were when they were counted, but {came} came"
            raise DataError(detail, path=split.path, place=f"from record {split.first} on")

    def _put(self, reading: Reading, piece: Piece) -> None:
        with self._changed:
            self._wait(lambda: not reading.buffered or reading.buffered + piece.records <= self._buffer)
            reading.pieces.append(piece)
            reading.buffered += piece.records
            self._changed.notify_all()

    def _decode_loop(self) -> None:
        try:
            while True:
                with self._changed:
                    self._wait(lambda: self._tickets > 0)
                    self._tickets -= 1
                with self._cutting:
                    if self._ended:
                        return
                    number = self._cut
                    self._cut += 1
                    pieces, receipts, error = self._cut_or_error()
                    self._ended = error is not None or not pieces
                batch: T | None = None
                if error is None and pieces:
                    try:
                        batch = self._decode(concatenated([piece.rows() for piece in pieces]))
                    except BaseException as failure:
                        error, self._ended = failure, True
                with self._changed:
                    self._outcomes[number] = Outcome(batch, receipts, error)
                    self._changed.notify_all()
        except Closed:
            pass

    def _cut_or_error(self) -> tuple[list[Piece], list[Receipt], BaseException | None]:
        try:
            return self._cut_batch()
        except Closed:
            raise
        except BaseException as error:  # the caller would wait for ever if it ended this thread
            return [], [], error

    def _cut_batch(self) -> tuple[list[Piece], list[Receipt], BaseException | None]:
        """The records of the next batch; none at the end; or the error that came instead."""
        pieces: list[Piece] = []
        receipts: list[Receipt] = []
        missing = self._batch_size if self._cut - 1 != self._most_batches else 0
        while missing:
            with self._changed:
                self._wait(lambda: bool(self._readings) or self._all_taken)
                if not self._readings:
                    break
                reading = self._readings[0]
                self._wait(lambda: bool(reading.pieces) or reading.finished)  # noqa: B023 - used at once
                if not reading.pieces:
                    if reading.error is not None:
                        return [], [], reading.error
                    self._readings.popleft()
                    self._changed.notify_all()
                    continue
                piece, taken, last = reading.take(missing)
                if reading.finished and not reading.pieces and reading.error is None:
                    self._readings.popleft()
                self._changed.notify_all()
            pieces.append(piece)
            receipts += taken
            missing -= piece.records
            if last and missing and self._drop_remainder:
                pieces, missing = [], self._batch_size
            elif last:
                break
        return pieces, receipts, None
