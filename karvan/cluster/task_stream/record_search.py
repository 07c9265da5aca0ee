"""Finds the record that makes a batch raise an error, where loaders read the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from karvan.cluster.batch_messages import unpack
from karvan.cluster.task_stream.loader_connection import LoaderAccess, ask_any
from karvan.data.leasing.record_search import SearchResult, search_with
from karvan.data.leasing.task_records import TakenRecords, TaskToRead, after, places_of
from karvan.data.loading.read_jobs import Order
from karvan.outages import mark
from karvan.ragged import Batch


class LoadedRecordSearch:
    """A search by loaders: any loader reads the records again, as tasks that skip all others."""

    def __init__(self, access: LoaderAccess, seed: int | None) -> None:
        self._access = access
        self._seed = seed

    def find(
        self, suspects: Sequence[TakenRecords], checks: Sequence[Callable[[Batch], None]] = ()
    ) -> SearchResult:
        """The record among these that raises an error; checks: tried in turn until one finds it."""

        def use(check: Callable[[Batch], None]) -> Callable[[Order], None]:
            return lambda few: self._try(_tasks_of(suspects, few), check)

        return search_with(checks, suspects, self._seed, use)

    def _try(self, left: list[TaskToRead], check: Callable[[Batch], None]) -> None:
        while left:
            loader, answer = ask_any(self._access, "read_batch", tasks_head(left))
            if "failed" in answer.head:
                raise reading_error(loader, answer.head)
            batch = Batch.trusted(dict(unpack(answer)), answer.head["samples"])
            if batch.samples:  # a transform may drop records
                check(batch)
            left = _rest(left, answer.head["records"])


def tasks_head(tasks: Sequence[TaskToRead], ids: Sequence[str] = ()) -> dict[str, Any]:
    """The head of a call of `read_batch`; ids: the features that embedding workers get."""
    return {
        "tasks": [{"task": each.task._asdict(), "ends": each.ends} for each in tasks],
        **({"ids": list(ids)} if ids else {}),
    }


def reading_error(loader: int, head: Mapping[str, Any]) -> RuntimeError:
    """The error of a loader that could not read a task."""
    error = RuntimeError(f"loader {loader}: {head['failed']}")
    return error if head["kind"] == "failed" else mark(error, head["kind"] == "temporary")


def _tasks_of(suspects: Sequence[TakenRecords], few: Order) -> list[TaskToRead]:
    """Tasks that have only some of the suspects, by their indices among all."""
    made: list[TaskToRead] = []
    for lease, places, _ in suspects:
        mine = places[few[(few >= 0) & (few < len(places))]]
        few = few - len(places)
        if len(mine):
            others = np.setdiff1d(np.arange(lease.task.records), mine)
            task = lease.task._replace(done=0, skipped=tuple(map(int, others)))
            made.append(TaskToRead(task, ends=False))
    made[-1] = made[-1]._replace(ends=True)
    return made


def _rest(tasks: Sequence[TaskToRead], records: int) -> list[TaskToRead]:
    """What is left of tasks after this many records."""
    left = list(tasks)
    while records:
        task, ends = left.pop(0)
        rest = after(task, records)
        records -= min(records, len(places_of(task)))
        if rest is not None:
            left.insert(0, TaskToRead(rest, ends))
    return left
