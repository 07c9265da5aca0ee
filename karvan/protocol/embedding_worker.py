"""The calls of an embedding worker: loaders put ids, trainers claim batches and send gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.parameter_server import PUSH_FIELDS, check_passes
from karvan.protocol.values import (
    BATCH,
    DECLARED,
    MEMBER,
    MOST_DIM,
    NOW,
    NUMBER,
    STEP,
    TABLE,
    TRAINER_HELLO,
    TRAINER_OPTIONS,
    WIRE,
    check_batch,
    expect_declared_names,
    expect_distinct,
    wire_dtype,
)
from karvan.wire.errors import RefusedError
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
    OptionalArrays,
    Text,
    TupleOf,
    Variant,
    table_of,
)

_INDEX = Integer(0, 2**20)

WORKER_HELLO = Variant(
    "run",
    Fields(
        {
            **TRAINER_HELLO,
            "trainers": Integer(0, 2**20),  # 0 in an elastic run, whose trainers come and go
            "worker": _INDEX,
            "servers": Integer(1, 2**20),
            "divisor": Integer(1, 2**20),
        },
        {**{name: kind for name, kind in TRAINER_OPTIONS.items() if name != "divisor"}, "elastic": Boolean()},
    ),
    Fields({}, {"loader": Boolean()}),  # a loader, which only sends ids, says nothing more
)

_REFERENCE = Text(200)
_REFERENCES = ListOf(_REFERENCE)
_ENGINE = Text(64)
# Name of the table, dim, combiner, length, rounds and size of a hash stack, whether weights count, what a
# batch without the feature means, and the id that fills up rows.
_FEATURE = TupleOf(
    TABLE,
    Integer(1, MOST_DIM),
    OneOf("sum", "mean", "mean_by_count", "mean_by_density", "sqrtn", "sequence", "tile", "ragged", "index"),
    Nullable(Integer(1, 2**20)),
    Nullable(TupleOf(Integer(1, 2**10), Integer(1, 2**62))),
    Boolean(),
    OneOf("error", "empty"),
    Nullable(Integer(-(2**63), 2**64 - 1)),
)
_SIZE = Integer(0, 2**48)
# Of an index: how many vectors it refers to, its samples and length, whether with weights.
_ROW_INDEX = TupleOf(_SIZE, _SIZE, _SIZE, Boolean())
_LAYOUTS = ListOf(
    TupleOf(_SIZE, _SIZE, _SIZE, Boolean(), Nullable(_ROW_INDEX)), 65535
)  # samples, ids, length, whether with offsets, and the index, if it has one
_RESTARTED = ListOf(TupleOf(_INDEX, Text(64)))  # servers, and their new incarnations
_NEEDS = Fields({"needs": OneOf("engine", "ids"), "text": Text(2000)}, {"reference": _REFERENCE})


def _has_vectors(answer: Mapping[str, Any]) -> bool:
    return "needs" not in answer


def _check_engine(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    expect_declared_names(head["tables"])
    dims: dict[str, int] = {}
    for feature, (table, dim, *_) in head["features"].items():
        if dims.setdefault(table, dim) != dim:
            raise RefusedError(
                f"expected one dim for table '{table}', got {dims[table]}, and {dim} for feature '{feature}'."
            )


def _check_backward(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    check_passes(head)
    if len(head["passes"]) != len(head["mine"]):
        raise RefusedError(f"expected descriptions of {len(head['mine'])} passes, got {len(head['passes'])}.")
    for each in head["passes"]:
        expect_distinct("the features of a pass", each["given"])


WORKER_CALLS = table_of(
    Call(
        "put",
        Fields({"reference": _REFERENCE, "batch": BATCH}),
        [DescribedArrays()],
        answer=Fields({"kept": Boolean()}),
        rule=check_batch,
    ),
    Call("forget", Fields({"references": _REFERENCES})),
    Call("abandon", Fields({"members": ListOf(MEMBER)})),  # of an elastic run: they are gone
    Call("describe", answer=MapOf(NUMBER)),
    Call(
        "engine",
        Fields(
            {
                "engine": _ENGINE,
                "features": MapOf(_FEATURE, 65535, TABLE),
                "wire": WIRE,
                "tables": DECLARED,
                "declarations": NUMBER,
            }
        ),
        rule=_check_engine,
    ),
    Call(
        "claim",
        Fields(
            {
                "engine": _ENGINE,
                "store": NUMBER,
                "batch": NUMBER,
                "reference": _REFERENCE,
                "training": Boolean(),
                "step": STEP,
                "now": NOW,
                "done": ListOf(NUMBER),
                "gone": _REFERENCES,
                "declarations": NUMBER,
            }
        ),
        answer=Variant("needs", _NEEDS, Fields({"layouts": _LAYOUTS, "restarted_servers": _RESTARTED})),
        answers=[
            OptionalArrays(
                _has_vectors,
                [
                    ArrayKind("vectors", ("float32", "uint16"), ANY),
                    ArrayKind("offsets", "int64", ANY),
                    ArrayKind("rows", "int32", ANY),
                    ArrayKind("weights", "float32", ANY),
                ],
            )
        ],
    ),
    Call(
        "backward",
        Fields(
            {
                **PUSH_FIELDS,
                "mine": ListOf(Integer(0, 1023), 1024),
                "engine": _ENGINE,
                "passes": ListOf(
                    Fields({"reference": _REFERENCE, "given": ListOf(Integer(0, 65534), 65535)}), 1024
                ),
                "gone": _REFERENCES,
                "declarations": NUMBER,
            },
            {"step": NUMBER},  # in an elastic run
        ),
        [ForEach(lambda head: len(head["mine"]), [ArrayKind("gradients", wire_dtype, ANY)])],
        answer=Variant("needs", _NEEDS, Fields({"restarted_servers": _RESTARTED})),
        rule=_check_backward,
    ),
)
