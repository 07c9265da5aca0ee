"""`LeasedIds`: refers to the ids of a batch of leased records, which any loader can send again.

An embedding worker that is replaced has lost the ids of the batches that trainers have not finished. Loaders
do not keep them either. But the reference knows the tasks of which its batch was the first one, and the same
call has the same answer in every loader: one of them reads the batch once more, and sends its ids to the
worker, under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from karvan import distributed
from karvan.cluster.task_stream.loader_connection import LoaderAccess, ask_any
from karvan.cluster.task_stream.record_search import reading_error, tasks_head
from karvan.data.leasing.task_records import TaskToRead, places_of
from karvan.outages import mark
from karvan.ragged import REFERENCE, Batch, IdsReference


class LeasedIds(IdsReference):
    """The reference of a batch that was the first one of these tasks."""

    __slots__ = ("tasks",)

    def __init__(self, reference: IdsReference, tasks: Sequence[TaskToRead]) -> None:
        super().__init__(reference.worker, reference.name, reference.rows)
        self.tasks = tasks


def with_tasks(batch: Batch, tasks: Sequence[TaskToRead], records: int) -> Batch:
    """A batch as the engines take it: a reference in it knows the tasks whose first `records` it has."""
    found = batch.get(REFERENCE)
    if not isinstance(found, IdsReference):
        return batch
    needed, left = 0, records
    while left > 0:
        left -= len(places_of(tasks[needed].task))
        needed += 1
    reference = LeasedIds(found, tasks[:needed])
    if (workers := distributed.current().workers) is not None:
        workers.watch(reference)
    return Batch.trusted({**batch, REFERENCE: reference}, batch.samples)


def resender(access: LoaderAccess, ids: Sequence[str], digest: str) -> Callable[[IdsReference], None]:
    """A function that has a loader send the ids of a batch again; see `Workers.resend`."""

    def resend(reference: IdsReference) -> None:
        assert isinstance(reference, LeasedIds)
        to = {"worker": reference.worker, "name": reference.name}
        loader, answer = ask_any(access, "read_batch", {**tasks_head(reference.tasks, ids), "to": to})
        if "failed" in answer.head:
            raise mark(reading_error(loader, answer.head), temporary=True)  # it could be read before
        if answer.head["digest"] != digest or answer.head["samples"] != reference.rows:
            raise ValueError(
                f"loader {loader} expected to read the batch of {reference.tasks[0].task} again, with "
                f"{reference.rows} samples, as an embedding worker has lost its ids; got "
                f"{answer.head['samples']} samples, or other data. Do not change files while a job runs."
            )

    return resend
