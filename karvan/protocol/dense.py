"""The calls of trainers about a server's dense parameters; see `karvan.cluster.parameter_server`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.values import MODEL, NUMBER, expect_distinct
from karvan.wire.errors import RefusedError
from karvan.wire.message import Array
from karvan.wire.schema.calls import ArrayKind, Call, OptionalArrays, table_of
from karvan.wire.schema.kinds import (
    FLOAT32_MAX,
    Boolean,
    Fields,
    Float,
    Integer,
    Kind,
    ListOf,
    MapOf,
    Nullable,
    Plain,
    Text,
    TupleOf,
)

_MODEL = {"model": MODEL}
_VERSION = {"version": NUMBER}
_NAME = Text(1000)
_TRAINER = Text(200)
# The names and shapes of tensors that are stored one after the other in one array.
_TENSORS: dict[str, Kind] = {"tensors": ListOf(TupleOf(_NAME, ListOf(Integer(0, 2**48), 32)), 2**16)}
_MOST_FLOATS = 2**48

# One of torch's optimizers: its options are numbers, text, and short lists of numbers.
_OPTION = Plain(
    lambda value: value is None or isinstance(value, bool | int | float | str) or _is_short_list(value),
    "null, a number, text or up to 8 numbers",
)
OPTIMIZER = Fields({"name": Text(100), "options": MapOf(_OPTION, 64, Text(100))})

RATE = Nullable(Float(0.0, FLOAT32_MAX))
STALENESS = Integer(-(2**53), 2**53)  # of a server that lost steps it is negative
ANSWER = TupleOf(Boolean(), NUMBER, Boolean(), STALENESS, Text(40, 0))  # karvan.dense.step_policies.Answer

# A state of dense parameters, without its tensors.
ANSWERS = MapOf(
    ListOf(TupleOf(NUMBER, Boolean(), NUMBER, Boolean(), STALENESS, Text(40, 0))), 2**20, _TRAINER
)
WAITING = Fields({"trainer": _TRAINER, "sequence": NUMBER, "staleness": STALENESS, "lr": RATE})

_FLAT = ArrayKind("tensors", "float32", lambda head: _floats_of(head))
_BYTES = ArrayKind("the state", "uint8", "bytes")


def _is_short_list(value: Any) -> bool:
    plain = (int, float, type(None))
    return isinstance(value, list) and len(value) <= 8 and all(type(each) in plain for each in value)


def _floats_of(head: Mapping[str, Any]) -> int:
    size = 0
    for _, shape in head["tensors"]:
        size += math.prod(shape)
        if size > _MOST_FLOATS:
            raise RefusedError(f"expected tensors of up to {_MOST_FLOATS} numbers together, got more.")
    return size


def _check_tensors(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    names = [name for name, _ in head["tensors"]]
    if len(set(names)) != len(names):
        expect_distinct("the tensors", names)


DENSE_CALLS = table_of(
    Call(
        "pull_dense",
        Fields({**_MODEL, "version": Nullable(NUMBER)}),
        answer=Fields(_VERSION, _TENSORS),
        answers=[OptionalArrays(lambda answer: "tensors" in answer, [_FLAT])],
    ),
    Call(
        "push_dense",
        Fields({**_MODEL, **_TENSORS, **_VERSION, "trainer": _TRAINER, "sequence": NUMBER, "lr": RATE}),
        [_FLAT],
        answer=Fields({"answer": ANSWER}),
        rule=_check_tensors,
    ),
    Call(  # of an elastic run: a commit applies them
        "stage_dense",
        Fields({**_MODEL, **_TENSORS, **_VERSION, "step": NUMBER, "lr": RATE}),
        [_FLAT],
        answer=Fields(_VERSION),
        rule=_check_tensors,
    ),
    Call("next_sequence", Fields({**_MODEL, "trainer": _TRAINER}), answer=Fields({"sequence": NUMBER})),
    Call("flush_dense", Fields(_MODEL), answer=Fields(_VERSION)),
    Call("dense_state", Fields(_MODEL), answers=[_BYTES]),
    Call("load_dense_state", Fields(_MODEL, {"first": Boolean()}), [_BYTES], answer=Fields(_VERSION)),
)
