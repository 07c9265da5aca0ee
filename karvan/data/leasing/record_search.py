"""`RecordSearch`: finds the record that makes a batch raise an error.

The records of the batch are read, decoded and transformed again, half of them, a quarter, and so on, until
one record alone raises. A function may check the decoded records as well, such as the forward of a model.

No record is to blame if the error does not come again, if it takes several records, or if others raise alone
just as well: then it is the program that is wrong, or a damaged block of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch

from karvan.activity import activity
from karvan.data.columns.missing_values import ValueChecks
from karvan.data.leasing.task_records import TakenRecords, numbers_of, place_of, splits_of
from karvan.data.loading.pipeline import Closed
from karvan.data.loading.read_jobs import Order, joined
from karvan.data.loading.settings import ReadSettings
from karvan.data.retry import RetryingSource
from karvan.distributed import RankError
from karvan.errors import is_out_of_memory, is_temporary
from karvan.ragged import Batch
from karvan.wire import RefusedError
from karvan.work.ledger import JobFailedError
from karvan.work.task import TaskLease

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
        retrying = RetryingSource(self._settings.source, self._settings.retry_seconds)
        source = retrying if self._checks is None else self._checks.over(retrying)
        return joined([rows for split in splits_of(path, numbers) for rows in source.read(split)])

    def _unreadable(self, records: TakenRecords) -> BadRecord | None:
        """The record that cannot be read, if it is one alone."""
        task = records.lease.task
        numbers = np.sort(numbers_of(task, records.places, self._seed))
        indices = search_records(len(numbers), lambda few: self._rows(task.path, numbers[few])).at
        if indices is None:
            return None
        number = int(numbers[indices])
        return BadRecord(records.lease, place_of(task, number, self._seed), number)


def search_with(
    checks: Sequence[Check],
    suspects: Sequence[TakenRecords],
    seed: int | None,
    use: Callable[[Check], Callable[[Order], object]],
) -> SearchResult:
    """The record that raises alone when it is used with a check; each is tried until one finds it."""
    result = SearchResult(None)
    for check in checks or (_no_check,):
        first_bad = search_records(sum(len(suspect.places) for suspect in suspects), use(check))
        result = SearchResult(_record(suspects, first_bad.at, seed), first_bad.every)
        if result.record is not None:
            break
    return result


def _record(suspects: Sequence[TakenRecords], index: int | None, seed: int | None) -> BadRecord | None:
    """The record that is number `index` of all suspects."""
    for lease, places, _ in suspects if index is not None else ():
        assert index is not None
        if index < len(places):
            numbers = numbers_of(lease.task, places[index : index + 1], seed)
            return BadRecord(lease, int(places[index]), int(numbers[0]))
        index -= len(places)
    return None


class RaisingRecord(NamedTuple):
    """Which record raises alone, if one does, and whether others that were tried do as well."""

    at: int | None
    every: bool = False


def search_records(count: int, use: Callable[[Order], object]) -> RaisingRecord:
    """Which of `count` records raises alone when it is used."""

    def raises(few: Order) -> bool:
        activity.advance()
        return _unless_raised(lambda: (use(few),)) is None

    few = np.arange(count)
    if not raises(few):
        return RaisingRecord(None)
    while len(few) > 1:
        halves = np.array_split(few, 2)
        bad = next((half for half in halves if raises(half)), None)
        if bad is None:  # it takes several records
            return RaisingRecord(None)
        few = bad
    index = int(few[0])
    others = [number for number in range(0, count, max(1, count // _OTHERS)) if number != index]
    every = bool(others) and all(raises(np.array([other])) for other in others)
    return RaisingRecord(None if every else index, every)


def _unless_raised(call: Callable[[], T]) -> T | None:
    """The result; None if it has raised an error that a record may have raised."""
    try:
        return call()
    except Exception as error:
        if not may_be_of_a_record(error):
            raise
        return None


def _no_check(batch: Batch) -> None:
    """Reading, decoding and transforming them is all."""
