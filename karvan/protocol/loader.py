"""The calls of a loader; `karvan/cluster/loader/service.py` has the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.batches import BATCH, NAME, check_batch
from karvan.protocol.values import NUMBER, TRAINER_HELLO
from karvan.wire.message import Array
from karvan.wire.schema.calls import ANY, ArrayKind, Call, DescribedArrays, ForEach, table_of
from karvan.wire.schema.kinds import (
    Boolean,
    Fields,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Plain,
    Text,
    TupleOf,
    Variant,
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
