"""The calls of a loader; `karvan/cluster/loader/service.py` has the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.values import BATCH, NAME, NUMBER, TRAINER_HELLO, check_batch
from karvan.protocol.work import PART_PATH, SEED, TASK
from karvan.wire.message import Array
from karvan.wire.schema import (
    ANY,
    ArrayKind,
    Boolean,
    Call,
    DescribedArrays,
    Fields,
    ForEach,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Plain,
    Text,
    TupleOf,
    Variant,
    table_of,
)

_INDEX = Integer(0, 2**20)
_POSITION = Plain()  # of a source, which alone can interpret it
_KNOWN = TupleOf(NUMBER, _POSITION)  # an index, and the position before it
_DIGEST = Text(64)
_REFERENCE = TupleOf(NUMBER, NUMBER, NUMBER)  # generation, epoch and number

LOADER_HELLO = Fields(
    {
        **TRAINER_HELLO,
        "kind": OneOf("batches", "watch", "control"),
        "loader": _INDEX,
        "loaders": Integer(1, 2**20),
        "ids": ListOf(NAME, 2**16),
        "epoch": NUMBER,
        "next": NUMBER,
        "taken": ListOf(NUMBER),
        "end": Nullable(_KNOWN),
        "positions": ListOf(_KNOWN),
        "unfinished": ListOf(TupleOf(NUMBER, NUMBER)),  # epoch and index
        "before_unfinished": Nullable(TupleOf(NUMBER, NUMBER, _POSITION)),
    }
)

_WAIT = Fields({"wait": ListOf(_INDEX)})  # trainers that are missing
_WAITING = Fields({"wait": Boolean()})
_END = Fields({"epoch": NUMBER, "end": NUMBER, "position": _POSITION})
_BATCH = Fields(
    {
        "batch": BATCH,
        "epoch": NUMBER,
        "index": NUMBER,
        "position": _POSITION,
        "meta": Plain(),
        "rows": Integer(0, 2**48),
    },
    {"statistics": _DIGEST, "reference": _REFERENCE, "worker": _INDEX},
)


def _check_next(answer: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    check_batch(answer if "batch" in answer else {"batch": {}}, arrays)


def _states(answer: Mapping[str, Any]) -> int:
    """One array of complete state for each digest, if the call asked for them."""
    return len(answer["statistics"]) if answer["whole"] and "statistics" in answer else 0


STATISTICS = Call(
    "statistics",
    Fields({"whole": Boolean()}),
    answer=Variant("wait", _WAITING, Fields({"statistics": MapOf(_DIGEST, 1024, NAME)})),
    answers=[ForEach(_states, [ArrayKind("states", "uint8", ANY)])],
)

LOADER_CALLS = table_of(
    Call(
        "next",
        Fields({"epoch": NUMBER}),
        answer=Variant("wait", _WAIT, Variant("end", _END, _BATCH)),
        answers=[DescribedArrays()],
        answer_rule=_check_next,
    ),
    Call("stay"),
    Call("done", Fields({"references": ListOf(_REFERENCE)})),
    Call(
        "resend",
        Fields({"reference": _REFERENCE, "worker": _INDEX}),
        answer=Variant("wait", _WAITING, Fields({}, {"statistics": _DIGEST})),
    ),
    Call("identity", answer=Variant("wait", _WAITING, Fields({"identity": Nullable(MapOf(Plain()))}))),
    STATISTICS,
    Call("leave"),
)


# The calls of a loader that reads leased tasks; `cluster/loader/task_service.py` has the protocol.


TASK_READING_HELLO = Fields({"loader": _INDEX})
_DESCRIPTION = Fields(
    {
        "parts": ListOf(TupleOf(PART_PATH, NUMBER)),
        "records_per_task": Integer(1),
        "seed": SEED,
        "batch_size": Integer(1),
        "identity": MapOf(Plain()),
        "digest": _DIGEST,
    }
)
_TASK_BATCH = Fields({"batch": BATCH, "records": Integer(1), "samples": Integer(0, 2**48), "digest": _DIGEST})
_FAILURE = Fields(
    {"failed": Text(20_000), "task": Nullable(NUMBER), "kind": OneOf("damaged", "temporary", "failed")}
)


def _check_answer(answer: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    check_batch(answer if "batch" in answer else {"batch": {}}, arrays)


TASK_READING_CALLS = table_of(
    Call("describe", answer=Variant("wait", _WAITING, _DESCRIPTION)),
    STATISTICS,
    Call(
        "read_batch",
        Fields(
            {"tasks": ListOf(Fields({"task": TASK, "ends": Boolean()}), 2**17, 1)},
            {"ids": ListOf(NAME, 2**16), "to": Fields({"worker": _INDEX, "name": Text(200)})},
        ),
        answer=Variant("wait", _WAITING, Variant("failed", _FAILURE, _TASK_BATCH)),
        answers=[DescribedArrays()],
        answer_rule=_check_answer,
    ),
    Call("stop_reading"),
)
