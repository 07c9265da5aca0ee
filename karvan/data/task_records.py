"""The records of a task: their order, what is left of them, how they are read, and which one raises an error.

A record of a task has a *place* in the order in which the task hands its records out, and a *number* in its
file. Without a seed both grow together. With one, the order is a permutation that depends on (seed, epoch,
task) alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch

from karvan.activity import activity
from karvan.data.columns.missing_values import ValueChecks
from karvan.data.errors import DataError, reason
from karvan.data.loading.pipeline import Closed, Order, ReadJob, joined
from karvan.data.loading.rank_shares import permutation
from karvan.data.loading.settings import ReadSettings
from karvan.data.retry import RetryingSource
from karvan.data.source import Split
from karvan.data.work_client import WorkClient
from karvan.distributed import RankError
from karvan.errors import is_ours, is_out_of_memory, is_temporary, origin_of
from karvan.ragged import Batch
from karvan.wire import RefusedError
from karvan.work.ledger import JobFailedError
from karvan.work.task import Task, TaskLease


class TakenRecords(NamedTuple):
    """Records of a task that a batch contains, by their places.

    done: how many records of the task are done when the batch is.
    """

    lease: TaskLease
    places: Order
    done: int


def records_done(batches: Iterable[TakenRecords]) -> dict[int, int]:
    """How many records of each leased task are done when a batch is, by token."""
    return {records.lease.token: records.done for records in batches}


def places_of(task: Task) -> Order:
    """The records of a task that are left, by their places."""
    places = np.arange(task.done, task.records)
    return places[~np.isin(places, task.skipped)]


def numbers_of(task: Task, places: Order, seed: int | None) -> Order:
    """The numbers of records in their file, by their places."""
    if seed is None:
        return task.first + places
    return task.first + permutation(task.records, seed, task.epoch, task.number)[places]


def place_of(task: Task, number: int, seed: int | None) -> int:
    """The place of a record, by its number in the file."""
    return int(np.flatnonzero(numbers_of(task, np.arange(task.records), seed) == number)[0])


def splits_of(path: str, numbers: Order) -> tuple[Split, ...]:
    """Splits that read these records and no others; the numbers grow."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return tuple(Split(path, int(run[0]), len(run)) for run in runs if len(run))


def read_job(task: Task, seed: int | None, *, last: bool) -> ReadJob:
    """Reads the records that are left, in their order. Those that are skipped are not even read."""
    places = places_of(task)
    split = Split(task.path, task.first, task.records)
    if seed is None and len(places) == task.records:
        return ReadJob(task.epoch, (split,), len(places), last=last)
    if not task.skipped:
        return ReadJob(
            task.epoch, (split,), len(places), lambda: numbers_of(task, places, seed) - task.first, last=last
        )
    skipped = np.sort(numbers_of(task, np.asarray(task.skipped), seed))
    read = np.setdiff1d(np.arange(task.first, task.first + task.records), skipped)

    def order() -> Order:
        return np.searchsorted(read, numbers_of(task, places, seed))

    return ReadJob(task.epoch, splits_of(task.path, read), len(places), order, last=last)


class TaskToRead(NamedTuple):
    """A task, and whether a batch ends with its last record; otherwise one may go on in the next task."""

    task: Task
    ends: bool


def after(task: Task, records: int) -> Task | None:
    """What is left of a task when this many of the records that were left have been read; None: nothing."""
    rest = places_of(task)[records:]
    return task._replace(done=int(rest[0])) if len(rest) else None


def rest_of(tasks: Iterable[TaskToRead], records: int) -> list[TaskToRead]:
    """What is left of tasks after this many of the records that were left have been read."""
    rest = list(tasks)
    while records:
        task, ends = rest.pop(0)
        remaining = after(task, records)
        records -= min(records, len(places_of(task)))
        if remaining is not None:
            rest.insert(0, TaskToRead(remaining, ends))
    return rest


# `RecordSearch`: finds the record that makes a batch raise an error.
#
# The records of the batch are read, decoded and transformed again, half of them, a quarter, and so on, until
# one record alone raises. A function may check the decoded records as well, such as the forward of a model.
#
# No record is to blame if the error does not come again, if it takes several records, or if others raise
# alone just as well: then it is the program that is wrong, or a damaged block of a file.

_log = logging.getLogger("karvan.data")

_OTHERS = 16  # records that are tried alone, until one raises nothing

Check = Callable[[Batch], None]
T = TypeVar("T")


class BatchError(Exception):
    """A leased batch has raised the error that is the cause of this one; `records` are those of the batch."""

    def __init__(self, records: Sequence[TakenRecords]) -> None:
        super().__init__(" and ".join(str(record.lease.task) for record in records))
        self.records = list(records)


class BadRecord(NamedTuple):
    """A record that raises an error alone: its place in the order of its task, and its number in the file."""

    lease: TaskLease
    place: int
    number: int

    def __str__(self) -> str:
        return f"record {self.number} of {self.lease.task.path} (epoch {self.lease.task.epoch})"


_OF_OTHERS = (
    *(torch.OutOfMemoryError, torch.AcceleratorError, RankError, RefusedError),
    *(JobFailedError, Closed, BatchError),
)


class SearchResult(NamedTuple):
    """record: the bad one, if there is one. every: whether others that were read raise an error as well."""

    record: BadRecord | None
    every: bool = False


def may_be_of_a_record(error: BaseException) -> bool:
    """Whether the data of a batch may have raised an error: no outage, and nothing of the job itself."""
    of_others = isinstance(error, _OF_OTHERS) or is_temporary(error) or is_out_of_memory(error)
    return isinstance(error, Exception) and not of_others


@contextmanager
def blaming(
    records: Sequence[TakenRecords] | Callable[[Exception], Sequence[TakenRecords]],
) -> Iterator[None]:
    """Raise a BatchError for an error that these records may have raised, or those that a function names."""
    try:
        yield
    except Exception as error:
        if not may_be_of_a_record(error):
            raise
        suspects = records(error) if callable(records) else records
        if not suspects:
            raise
        raise BatchError(suspects) from error


class RecordSearch:
    """Reads records of leased tasks again, as their loader reads them."""

    def __init__(self, settings: ReadSettings, seed: int | None, checks: ValueChecks | None = None) -> None:
        self._settings = settings
        self._seed = seed
        self._checks = checks

    def find(self, suspects: Sequence[TakenRecords], checks: Sequence[Check] = ()) -> SearchResult:
        """The record among these that raises an error; checks: tried in turn until one finds it."""
        blocks = []
        for suspect in suspects:
            rows = _unless_raised(partial(self._read, suspect))
            if rows is None:
                return SearchResult(self._unreadable(suspect))
            blocks.append(rows)
        rows = joined(blocks)
        return search_with(checks, suspects, self._seed, lambda check: partial(self._try, rows, check))

    def _try(self, rows: pa.RecordBatch, check: Check, few: Order) -> None:
        batch = self._settings.steps.finish([rows.take(pa.array(few))])
        if batch.samples:  # a transform may drop records
            check(batch)

    def _read(self, records: TakenRecords) -> pa.RecordBatch:
        """The records in the order of their places."""
        wanted = numbers_of(records.lease.task, records.places, self._seed)
        numbers = np.sort(wanted)
        rows = self._rows(records.lease.task.path, numbers)
        return rows.take(pa.array(np.searchsorted(numbers, wanted)))

    def _rows(self, path: str, numbers: Order) -> pa.RecordBatch:
        source = RetryingSource(self._settings.source, self._settings.retry_seconds)
        read = source.read if self._checks is None else self._checks.reader(source)
        return joined([rows for split in splits_of(path, numbers) for rows in read(split)])

    def _unreadable(self, records: TakenRecords) -> BadRecord | None:
        """The record that cannot be read, if it is one alone."""
        task = records.lease.task
        numbers = np.sort(numbers_of(task, records.places, self._seed))
        index, _ = search_records(len(numbers), lambda few: self._rows(task.path, numbers[few]))
        if index is None:
            return None
        number = int(numbers[index])
        return BadRecord(records.lease, place_of(task, number, self._seed), number)


def search_with(
    checks: Sequence[Check],
    suspects: Sequence[TakenRecords],
    seed: int | None,
    use: Callable[[Check], Callable[[Order], object]],
) -> SearchResult:
    """The record that raises alone when it is used with a check; each is tried until one finds it."""
    result = SearchResult(None)
    for check in checks or (lambda batch: None,):  # reading, decoding and transforming them is all
        index, every = search_records(sum(len(suspect.places) for suspect in suspects), use(check))
        result = SearchResult(None if index is None else _record(suspects, index, seed), every)
        if result.record is not None:
            break
    return result


def _record(suspects: Sequence[TakenRecords], index: int, seed: int | None) -> BadRecord:
    """The record that is number `index` of all suspects."""
    for lease, places, _ in suspects:
        if index < len(places):
            numbers = numbers_of(lease.task, places[index : index + 1], seed)
            return BadRecord(lease, int(places[index]), int(numbers[0]))
        index -= len(places)
    raise IndexError(index)


def search_records(count: int, use: Callable[[Order], object]) -> tuple[int | None, bool]:
    """Which of `count` records raises alone when it is used, and whether others that are tried do as well."""

    def raises(few: Order) -> bool:
        activity.advance()
        return _unless_raised(lambda: (use(few),)) is None

    few = np.arange(count)
    if not raises(few):
        return None, False
    while len(few) > 1:
        halves = np.array_split(few, 2)
        bad = next((half for half in halves if raises(half)), None)
        if bad is None:  # it takes several records
            return None, False
        few = bad
    index = int(few[0])
    others = [number for number in range(0, count, max(1, count // _OTHERS)) if number != index]
    every = bool(others) and all(raises(np.array([other])) for other in others)
    return None if every else index, every


def _unless_raised(call: Callable[[], T]) -> T | None:
    """The result; None if it has raised an error that a record may have raised."""
    try:
        return call()
    except Exception as error:
        if not may_be_of_a_record(error):
            raise
        return None


# Reports to the master that records of a task raise an error, and what to tell users about it.


def report(
    client: WorkClient,
    error: BaseException,
    suspects: Sequence[TakenRecords],
    record: BadRecord | None,
    hint: str = "",
) -> None:
    """Report the failure of a task: the bad record's, or the first one's if no record alone is to blame.

    Its lease ends, so all that is done of it must be acknowledged before. A JobFailedError if it has failed
    too often; hint: what to do about a bad record then.
    """
    lease = suspects[0].lease if record is None else record.lease
    place = () if record is None else (record.place, record.number)
    failed = client.fail(lease.token, described(error), *place)
    what = lease.task if record is None else record
    if failed.failure is not None:
        raise JobFailedError(failed.failure if record is None else failed.failure + hint) from error
    if failed.skipped:
        _log.warning("Skipped %s, bad record %d of the job: %s", what, failed.bad_records, described(error))
    elif failed.tries:
        times = f"{failed.tries} time{'s' * (failed.tries != 1)}"
        _log.warning("Failed %s, and is tried again: %s: %s", times, what, described(error))


def named_error(
    error: BaseException, suspects: Sequence[TakenRecords], record: BadRecord | None
) -> DataError:
    """An error that names the bad record, and the records of its batch."""
    batch = " and ".join(str(suspect.lease.task) for suspect in suspects)
    if record is None:
        return DataError(f"{described(error)}; no record alone raises it", place=batch)
    return DataError(f"{described(error)}; its batch is of {batch}", place=str(record))


def described(error: BaseException) -> str:
    """An error in one line: its type, the first line of its text, and where the program has raised it."""
    kind, text = type(error).__name__, reason(error)
    line = kind if text == kind else f"{kind}: {text}"
    return line if is_ours(error) or error.__traceback__ is None else f"{line} ({origin_of(error)})"
