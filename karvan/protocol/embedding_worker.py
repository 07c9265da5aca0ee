"""The calls of an embedding worker: loaders put ids, trainers claim batches and send gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from karvan.protocol.parameter_server import PushedBatches, check_passes
from karvan.protocol.values import (
    BATCH,
    DECLARED,
    MEMBER,
    MOST_DIM,
    NOW,
    NUMBER,
    STEP,
    TABLE,
    WIRE,
    DeclaredTable,
    RunHello,
    check_batch,
    expect_declared_names,
    expect_distinct,
    wire_dtype,
)
from karvan.wire.message import Array, RefusedError
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
    OptionalArrays,
    Struct,
    Text,
    TupleOf,
    Variant,
    field,
    optional,
    table_of,
)

_INDEX = Integer(0, 2**20)


class WorkerHello(RunHello):
    """What a trainer says to an embedding worker."""

    worker: int = field(_INDEX)
    divisor: int = field(Integer(1, 2**20))


class IdSenderHello(Head):
    """What a loader says, which only sends ids."""

    loader: bool = optional(Boolean(), default=False)


WORKER_HELLO = Variant("run", Struct(WorkerHello), Struct(IdSenderHello))

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


class Put(Head):
    """The ids of a batch, under a name."""

    reference: str = field(_REFERENCE)
    batch: dict[str, tuple[str, Any]] = field(BATCH)


class PutAnswer(Head):
    """Whether there was room for the ids."""

    kept: bool = field(Boolean())


class IdNames(Head):
    """The names of ids that nobody needs any more."""

    references: list[str] = field(_REFERENCES)


class GoneMembers(Head):
    """Members of an elastic run that are gone."""

    members: list[int] = field(ListOf(MEMBER))


class OfEngine(Head):
    """A call that needs an engine of the trainer, and what the trainer has declared of its tables."""

    engine: str = field(_ENGINE)
    declarations: int = field(NUMBER)


class EngineHead(OfEngine):
    """The features of an engine, and their tables."""

    features: dict[str, Any] = field(MapOf(_FEATURE, 65535, TABLE))
    wire: str = field(WIRE)
    tables: dict[str, DeclaredTable] = field(DECLARED)


class Claim(OfEngine):
    """A batch whose ids the worker holds, to be looked up."""

    store: int = field(NUMBER)
    batch: int = field(NUMBER)
    reference: str = field(_REFERENCE)
    training: bool = field(Boolean())
    step: int = field(STEP)
    now: float = field(NOW)
    done: list[int] = field(ListOf(NUMBER))
    gone: list[str] = field(_REFERENCES)


class MissingParts(Head):
    """What the worker needs before it can answer."""

    needs: str = field(OneOf("engine", "ids"))
    text: str = field(Text(2000))
    reference: str = optional(_REFERENCE, default="")


class Backward(Head):
    """The servers that have restarted."""

    restarted_servers: list[tuple[int, str]] = field(_RESTARTED)


class Layouts(Backward):
    """The layouts of the outputs of a batch."""

    layouts: list[tuple[Any, ...]] = field(_LAYOUTS)


class Pass(Head):
    """The batch of a backward pass, and the features that have gradients."""

    reference: str = field(_REFERENCE)
    given: list[int] = field(ListOf(Integer(0, 65534), 65535))


class PushPasses(PushedBatches, OfEngine):
    """Gradients of the outputs of batches."""

    mine: list[int] = field(ListOf(Integer(0, 1023), 1024))
    passes: list[Pass] = field(ListOf(Struct(Pass), 1024))
    gone: list[str] = field(_REFERENCES)


def _check_engine(head: EngineHead, arrays: Sequence[Array]) -> None:
    expect_declared_names(head.tables)
    dims: dict[str, int] = {}
    for feature, (table, dim, *_) in head.features.items():
        if dims.setdefault(table, dim) != dim:
            raise RefusedError(
                f"expected one dim for table '{table}', got {dims[table]}, and {dim} for feature '{feature}'."
            )


def _check_backward(head: PushPasses, arrays: Sequence[Array]) -> None:
    check_passes(head)
    if len(head.passes) != len(head.mine):
        raise RefusedError(f"expected descriptions of {len(head.mine)} passes, got {len(head.passes)}.")
    for described in head.passes:
        expect_distinct("the features of a pass", described.given)


PUT = Call(
    "put",
    Struct(Put),
    [DescribedArrays()],
    answer=Struct(PutAnswer),
    rule=lambda head, arrays: check_batch(head.batch, arrays),
)
FORGET = Call("forget", Struct(IdNames))
ABANDON_MEMBERS = Call("abandon", Struct(GoneMembers))  # of an elastic run: they are gone
DESCRIBE_WORKER = Call("describe", answer=MapOf(NUMBER))
ENGINE = Call("engine", Struct(EngineHead), rule=_check_engine)
CLAIM = Call(
    "claim",
    Struct(Claim),
    answer=Variant("needs", Struct(MissingParts), Struct(Layouts)),
    answers=[
        OptionalArrays(
            lambda answer: not hasattr(answer, "needs"),
            [
                ArrayKind("vectors", ("float32", "uint16"), ANY),
                ArrayKind("offsets", "int64", ANY),
                ArrayKind("rows", "int32", ANY),
                ArrayKind("weights", "float32", ANY),
            ],
        )
    ],
)
BACKWARD = Call(
    "backward",
    Struct(PushPasses),
    [ForEach(lambda head: len(head.mine), [ArrayKind("gradients", wire_dtype, ANY)])],
    answer=Variant("needs", Struct(MissingParts), Struct(Backward)),
    rule=_check_backward,
)
WORKER_CALLS = table_of(PUT, FORGET, ABANDON_MEMBERS, DESCRIBE_WORKER, ENGINE, CLAIM, BACKWARD)
