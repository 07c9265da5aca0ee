"""The calls of a loader; `karvan/cluster/loader/epoch_service.py` has the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from karvan.protocol.master import (
    Parts,
    Positive,
    Seed,
    Task,
)
from karvan.protocol.values import (
    BatchColumns,
    ColumnName,
    Count,
    Index,
    TrainerHello,
    check_batch,
)
from karvan.wire.message import Array
from karvan.wire.schema import (
    ANY,
    ArrayKind,
    Call,
    DescribedArrays,
    ForEach,
    Head,
    Integer,
    Length,
    OneOf,
    Text,
    Variant,
    table_of,
)

_Position = Any  # of a source, which alone can interpret it
_KnownPosition = tuple[int, _Position]  # an index, and the position before it
_Digest = Annotated[str, Text(64)]
_Reference = tuple[int, int, int]  # generation, epoch and number


class LoaderHello(TrainerHello):
    """What a trainer needs of a loader, and what it has had."""

    kind: Annotated[str, OneOf("batches", "watch", "control")]
    loader: Index
    loaders: Count
    ids: Annotated[list[ColumnName], Length(2**16)]
    epoch: int
    next: int
    taken: list[int]
    end: _KnownPosition | None
    positions: list[_KnownPosition]
    unfinished: list[tuple[int, int]]  # epoch and index
    before_unfinished: tuple[int, int, Any] | None


class NoAnswerYet(Head):
    """There is no answer yet."""

    wait: bool


class MissingTrainers(Head):
    """There is no batch yet, maybe because these trainers have not connected."""

    wait: list[Index]


class EndOfEpoch(Head):
    """How many batches the epoch has, and the position after them."""

    epoch: int
    end: int
    position: _Position


class EpochBatch(Head):
    """A batch of an epoch, and the position after it; `worker` has its ids under the name `reference`."""

    batch: BatchColumns
    epoch: int
    index: int
    position: _Position
    meta: Any
    rows: Annotated[int, Integer(0, 2**48)]
    statistics: _Digest = ""
    reference: _Reference | None = None
    worker: Index | None = None


class EpochNumber(Head):
    """An epoch by its number."""

    epoch: int


class References(Head):
    """The names of batches that a trainer is done with."""

    references: Sequence[_Reference]


class IdsOfBatch(Head):
    """A batch, and the worker that needs its ids again."""

    reference: _Reference
    worker: Index


class StatisticsDigest(Head):
    """The digest of a loader's statistics, if it has some."""

    statistics: _Digest = ""


class DataIdentity(Head):
    """The identity of a loader's data, if it has one."""

    identity: dict[str, Any] | None


class Whole(Head):
    """Whether the states of transforms are wanted, and not only their digests."""

    whole: bool


class Statistics(Head):
    """The digest of each transform's statistics, by its name."""

    statistics: Annotated[dict[ColumnName, _Digest], Length(1024)]


def _check_arrays(answer: Head, arrays: Sequence[Array]) -> None:
    check_batch(getattr(answer, "batch", {}), arrays)


def _states(answer: Any) -> int:
    """One array of complete state for each digest, if the call asked for them."""
    return len(getattr(answer, "statistics", ())) if answer.whole else 0


NEXT = Call(
    "next",
    EpochNumber,
    answer=Variant("wait", MissingTrainers, Variant("end", EndOfEpoch, EpochBatch)),
    answers=[DescribedArrays()],
    answer_rule=_check_arrays,
)
STAY = Call("stay")
DONE = Call("done", References)
RESEND = Call("resend", IdsOfBatch, answer=Variant("wait", NoAnswerYet, StatisticsDigest))
IDENTITY = Call("identity", answer=Variant("wait", NoAnswerYet, DataIdentity))
STATISTICS = Call(
    "statistics",
    Whole,
    answer=Variant("wait", NoAnswerYet, Statistics),
    answers=[ForEach(_states, [ArrayKind("states", "uint8", ANY)])],
)
LEAVE = Call("leave")
LOADER_CALLS = table_of(NEXT, STAY, DONE, RESEND, IDENTITY, STATISTICS, LEAVE)


# The calls of a loader that reads leased tasks; `cluster/loader/task_service.py` has the protocol.


class TaskReadingHello(Head):
    """Which loader the caller expects."""

    loader: Index


class Description(Head):
    """The data that loaders read; and how they are cut into tasks and batches."""

    parts: Parts
    records_per_task: Positive
    seed: Seed
    batch_size: Positive
    identity: dict[str, Any]
    digest: _Digest


class RequestedTask(Head):
    """A task, and whether a batch ends with its last record."""

    task: Task
    ends: bool


class IdsReceiver(Head):
    """The embedding worker that gets the ids of a batch, and their name there."""

    worker: Index
    name: str


class RequestedTasks(Head):
    """The tasks whose first batch is requested; see `cluster/loader/task_service.py`."""

    tasks: Annotated[list[RequestedTask], Length(2**17, 1)]
    ids: Annotated[Sequence[ColumnName], Length(2**16)] = ()
    to: IdsReceiver | None = None


class FailedTask(Head):
    """Why there is no batch, and which of the requested tasks could not be read, if so."""

    failed: Annotated[str, Text(20000)]
    task: int | None
    kind: Annotated[str, OneOf("damaged", "temporary", "failed")]


class TaskBatch(Head):
    """The first batch of the requested tasks."""

    batch: BatchColumns
    records: Positive
    samples: Annotated[int, Integer(0, 2**48)]
    digest: _Digest


DESCRIBE = Call("describe", answer=Variant("wait", NoAnswerYet, Description))
READ_BATCH = Call(
    "read_batch",
    RequestedTasks,
    answer=Variant("wait", NoAnswerYet, Variant("failed", FailedTask, TaskBatch)),
    answers=[DescribedArrays()],
    answer_rule=_check_arrays,
)
STOP_READING = Call("stop_reading")
TASK_READING_CALLS = table_of(DESCRIBE, STATISTICS, READ_BATCH, STOP_READING)
