"""The calls of a loader; `karvan/cluster/loader/epoch_service.py` has the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from karvan.protocol.master import PART_PATH, SEED, TASK
from karvan.protocol.values import BATCH, NAME, NUMBER, TrainerHello, check_batch
from karvan.wire.message import Array
from karvan.wire.schema import (
    ANY,
    ArrayKind,
    Boolean,
    Call,
    DescribedArrays,
    ForEach,
    Head,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Plain,
    Struct,
    Text,
    TupleOf,
    Variant,
    field,
    optional,
    table_of,
)

_INDEX = Integer(0, 2**20)
_POSITION = Plain()  # of a source, which alone can interpret it
_KNOWN = TupleOf(NUMBER, _POSITION)  # an index, and the position before it
_DIGEST = Text(64)
_REFERENCE = TupleOf(NUMBER, NUMBER, NUMBER)  # generation, epoch and number


class LoaderHello(TrainerHello):
    """What a trainer needs of a loader, and what it has had."""

    kind: str = field(OneOf("batches", "watch", "control"))
    loader: int = field(_INDEX)
    loaders: int = field(Integer(1, 2**20))
    ids: list[str] = field(ListOf(NAME, 2**16))
    epoch: int = field(NUMBER)
    next: int = field(NUMBER)
    taken: list[int] = field(ListOf(NUMBER))
    end: tuple[int, Any] | None = field(Nullable(_KNOWN))
    positions: list[tuple[int, Any]] = field(ListOf(_KNOWN))
    unfinished: list[tuple[int, int]] = field(ListOf(TupleOf(NUMBER, NUMBER)))  # epoch and index
    before_unfinished: tuple[int, int, Any] | None = field(Nullable(TupleOf(NUMBER, NUMBER, _POSITION)))


class NoAnswerYet(Head):
    """There is no answer yet."""

    wait: bool = field(Boolean())


class MissingTrainers(Head):
    """There is no batch yet, maybe because these trainers have not connected."""

    wait: list[int] = field(ListOf(_INDEX))


class EndOfEpoch(Head):
    """How many batches the epoch has, and the position after them."""

    epoch: int = field(NUMBER)
    end: int = field(NUMBER)
    position: Any = field(_POSITION)


class EpochBatch(Head):
    """A batch of an epoch, and the position after it; `worker` has its ids under the name `reference`."""

    batch: dict[str, Any] = field(BATCH)
    epoch: int = field(NUMBER)
    index: int = field(NUMBER)
    position: Any = field(_POSITION)
    meta: Any = field(Plain())
    rows: int = field(Integer(0, 2**48))
    statistics: str = optional(_DIGEST, default="")
    reference: tuple[int, int, int] | None = optional(_REFERENCE, default=None)
    worker: int | None = optional(_INDEX, default=None)


class EpochNumber(Head):
    """An epoch by its number."""

    epoch: int = field(NUMBER)


class References(Head):
    """The names of batches that a trainer is done with."""

    references: Sequence[tuple[int, int, int]] = field(ListOf(_REFERENCE))


class IdsOfBatch(Head):
    """A batch, and the worker that needs its ids again."""

    reference: tuple[int, int, int] = field(_REFERENCE)
    worker: int = field(_INDEX)


class StatisticsDigest(Head):
    """The digest of a loader's statistics, if it has some."""

    statistics: str = optional(_DIGEST, default="")


class DataIdentity(Head):
    """The identity of a loader's data, if it has one."""

    identity: dict[str, Any] | None = field(Nullable(MapOf(Plain())))


class Whole(Head):
    """Whether the states of transforms are wanted, and not only their digests."""

    whole: bool = field(Boolean())


class Statistics(Head):
    """The digest of each transform's statistics, by its name."""

    statistics: dict[str, str] = field(MapOf(_DIGEST, 1024, NAME))


def _check_arrays(answer: Head, arrays: Sequence[Array]) -> None:
    check_batch(getattr(answer, "batch", {}), arrays)


def _states(answer: Any) -> int:
    """One array of complete state for each digest, if the call asked for them."""
    return len(getattr(answer, "statistics", ())) if answer.whole else 0


NEXT = Call(
    "next",
    Struct(EpochNumber),
    answer=Variant("wait", Struct(MissingTrainers), Variant("end", Struct(EndOfEpoch), Struct(EpochBatch))),
    answers=[DescribedArrays()],
    answer_rule=_check_arrays,
)
STAY = Call("stay")
DONE = Call("done", Struct(References))
RESEND = Call(
    "resend", Struct(IdsOfBatch), answer=Variant("wait", Struct(NoAnswerYet), Struct(StatisticsDigest))
)
IDENTITY = Call("identity", answer=Variant("wait", Struct(NoAnswerYet), Struct(DataIdentity)))
STATISTICS = Call(
    "statistics",
    Struct(Whole),
    answer=Variant("wait", Struct(NoAnswerYet), Struct(Statistics)),
    answers=[ForEach(_states, [ArrayKind("states", "uint8", ANY)])],
)
LEAVE = Call("leave")
LOADER_CALLS = table_of(NEXT, STAY, DONE, RESEND, IDENTITY, STATISTICS, LEAVE)


# The calls of a loader that reads leased tasks; `cluster/loader/task_service.py` has the protocol.


class TaskReadingHello(Head):
    """Which loader the caller expects."""

    loader: int = field(_INDEX)


class Description(Head):
    """The data that loaders read; and how they are cut into tasks and batches."""

    parts: Sequence[tuple[str, int]] = field(ListOf(TupleOf(PART_PATH, NUMBER)))
    records_per_task: int = field(Integer(1))
    seed: int | None = field(SEED)
    batch_size: int = field(Integer(1))
    identity: dict[str, Any] = field(MapOf(Plain()))
    digest: str = field(_DIGEST)


class RequestedTask(Head):
    """A task, and whether a batch ends with its last record."""

    task: dict[str, Any] = field(TASK)
    ends: bool = field(Boolean())


class IdsReceiver(Head):
    """The embedding worker that gets the ids of a batch, and their name there."""

    worker: int = field(_INDEX)
    name: str = field(Text(200))


class RequestedTasks(Head):
    """The tasks whose first batch is requested; see `cluster/loader/task_service.py`."""

    tasks: list[RequestedTask] = field(ListOf(Struct(RequestedTask), 2**17, 1))
    ids: Sequence[str] = optional(ListOf(NAME, 2**16), default=())
    to: IdsReceiver | None = optional(Struct(IdsReceiver), default=None)


class FailedTask(Head):
    """Why there is no batch, and which of the requested tasks could not be read, if so."""

    failed: str = field(Text(20_000))
    task: int | None = field(Nullable(NUMBER))
    kind: str = field(OneOf("damaged", "temporary", "failed"))


class TaskBatch(Head):
    """The first batch of the requested tasks."""

    batch: dict[str, Any] = field(BATCH)
    records: int = field(Integer(1))
    samples: int = field(Integer(0, 2**48))
    digest: str = field(_DIGEST)


DESCRIBE = Call("describe", answer=Variant("wait", Struct(NoAnswerYet), Struct(Description)))
READ_BATCH = Call(
    "read_batch",
    Struct(RequestedTasks),
    answer=Variant("wait", Struct(NoAnswerYet), Variant("failed", Struct(FailedTask), Struct(TaskBatch))),
    answers=[DescribedArrays()],
    answer_rule=_check_arrays,
)
STOP_READING = Call("stop_reading")
TASK_READING_CALLS = table_of(DESCRIBE, STATISTICS, READ_BATCH, STOP_READING)
