"""The calls of an embedding worker: loaders put ids, trainers claim batches and send gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from karvan.errors import RefusedError
from karvan.protocol.parameter_server import (
    PushedBatches,
    check_passes,
)
from karvan.protocol.values import (
    MOST_DIM,
    BatchColumns,
    Count,
    DeclaredTables,
    FloatType,
    Index,
    MemberNumber,
    RunHello,
    Step,
    TableName,
    check_batch,
    expect_declared_names,
    expect_distinct,
    wire_dtype,
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
    MapOf,
    Nullable,
    OneOf,
    OptionalArrays,
    Text,
    TupleOf,
    Variant,
    table_of,
)


class WorkerHello(RunHello):
    """What a trainer says to an embedding worker."""

    worker: Index
    divisor: Count


class IdSenderHello(Head):
    """What a loader says, which only sends ids."""

    loader: bool = False


WORKER_HELLO = Variant("run", WorkerHello, IdSenderHello)

# Name of the table, dim, combiner, length, rounds and size of a hash stack, whether weights count, what a
# batch without the feature means, and the id that fills up rows.
_FEATURE = TupleOf(
    TableName,
    Integer(1, MOST_DIM),
    OneOf("sum", "mean", "mean_by_count", "mean_by_density", "sqrtn", "sequence", "tile", "ragged", "index"),
    Nullable(Count),
    Nullable(TupleOf(Integer(1, 2**10), Integer(1, 2**62))),
    bool,
    OneOf("error", "empty"),
    Nullable(Integer(-(2**63), 2**64 - 1)),
)
_Size = Annotated[int, Integer(0, 2**48)]
# Of an index: how many vectors it refers to, its samples and length, whether with weights.
_RowIndex = tuple[_Size, _Size, _Size, bool]
# Samples, ids, length, whether with offsets, and the index, if it has one.
_LAYOUT = TupleOf(_Size, _Size, _Size, bool, Nullable(_RowIndex))


class Put(Head):
    """The ids of a batch, under a name."""

    reference: str
    batch: BatchColumns


class PutAnswer(Head):
    """Whether there was room for the ids."""

    kept: bool


class IdNames(Head):
    """The names of ids that nobody needs any more."""

    references: list[str]


class GoneMembers(Head):
    """Members of an elastic run that are gone."""

    members: list[MemberNumber]


class OfEngine(Head):
    """A call that needs an engine of the trainer, and what the trainer has declared of its tables."""

    engine: Annotated[str, Text(64)]
    declarations: int


class EngineHead(OfEngine):
    """The features of an engine, and their tables."""

    features: Annotated[dict[TableName, Annotated[Any, _FEATURE]], Length(65535)]
    wire: FloatType
    tables: DeclaredTables


class Claim(OfEngine):
    """A batch whose ids the worker holds, to be looked up."""

    store: int
    batch: int
    reference: str
    training: bool
    step: Step
    now: float
    done: list[int]
    gone: list[str]


class MissingParts(Head):
    """What the worker needs before it can answer."""

    needs: Annotated[str, OneOf("engine", "ids")]
    text: Annotated[str, Text(2000)]
    reference: str = ""


class Backward(Head):
    """The servers that have restarted."""

    restarted_servers: list[tuple[Index, Annotated[str, Text(64)]]]  # and their new incarnations


class Layouts(Backward):
    """The layouts of the outputs of a batch."""

    layouts: Annotated[list[Annotated[tuple[Any, ...], _LAYOUT]], Length(65535)]


class Pass(Head):
    """The batch of a backward pass, and the features that have gradients."""

    reference: str
    given: Annotated[list[Annotated[int, Integer(0, 65534)]], Length(65535)]


class PushPasses(PushedBatches, OfEngine):
    """Gradients of the outputs of batches."""

    mine: Annotated[list[Annotated[int, Integer(0, 1023)]], Length(1024)]
    passes: Annotated[list[Pass], Length(1024)]
    gone: list[str]


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
    Put,
    [DescribedArrays()],
    answer=PutAnswer,
    rule=lambda head, arrays: check_batch(head.batch, arrays),
)
FORGET = Call("forget", IdNames)
ABANDON_MEMBERS = Call("abandon", GoneMembers)  # of an elastic run: they are gone
DESCRIBE_WORKER = Call("describe", answer=MapOf(int))
ENGINE = Call("engine", EngineHead, rule=_check_engine)
CLAIM = Call(
    "claim",
    Claim,
    answer=Variant("needs", MissingParts, Layouts),
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
    PushPasses,
    [ForEach(lambda head: len(head.mine), [ArrayKind("gradients", wire_dtype, ANY)])],
    answer=Variant("needs", MissingParts, Backward),
    rule=_check_backward,
)
WORKER_CALLS = table_of(PUT, FORGET, ABANDON_MEMBERS, DESCRIBE_WORKER, ENGINE, CLAIM, BACKWARD)
