"""The calls of a parameter server about rows, dense parameters and commits of steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from karvan.errors import RefusedError
from karvan.protocol.values import (
    MOST_TABLES,
    Count,
    DeclaredTables,
    FilePath,
    Float32,
    FloatType,
    Index,
    MemberNumber,
    ModelNumber,
    RowState,
    Rules,
    RunHello,
    Step,
    Steps,
    TableName,
    TableNames,
    TableSpec,
    expect_declared_names,
    expect_distinct,
    expect_same_names,
    wire_dtype,
    words,
)
from karvan.wire.message import Array
from karvan.wire.schema import (
    ANY,
    FLOAT32_MAX,
    ArrayKind,
    Call,
    Fields,
    Float,
    ForEach,
    Head,
    Integer,
    Length,
    ListOf,
    MapOf,
    Nullable,
    OptionalArrays,
    Plain,
    Text,
    table_of,
)

# The calls of trainers about a server's dense parameters; see `karvan.cluster.parameter_server`.


_Shape = Annotated[list[Annotated[int, Integer(0, 2**48)]], Length(32)]
# The names and shapes of tensors that are stored one after the other in one array.
_Tensors = Annotated[list[tuple[Annotated[str, Text(1000)], _Shape]], Length(2**16)]
_MOST_FLOATS = 2**48

# One of torch's optimizers: its options are numbers, text, and short lists of numbers.
_OPTION = Plain(
    lambda value: value is None or isinstance(value, bool | int | float | str) or _is_short_list(value),
    "null, a number, text or up to 8 numbers",
)
OPTIMIZER = Fields({"name": Text(100), "options": MapOf(_OPTION, 64, Text(100))})

_Rate = Annotated[float, Float(0.0, FLOAT32_MAX)] | None
_Staleness = Annotated[int, Integer(-(2**53), 2**53)]  # of a server that lost steps it is negative
_Reason = Annotated[str, Text(40, 0)]
_Answer = tuple[bool, int, bool, _Staleness, _Reason]  # karvan.dense.steps.Answer

# A state of dense parameters, without its tensors.
ANSWERS = MapOf(list[tuple[int, bool, int, bool, _Staleness, _Reason]], 2**20)
WAITING = Fields({"trainer": str, "sequence": int, "staleness": _Staleness, "lr": _Rate})

_FLAT = ArrayKind("tensors", "float32", lambda head: _floats_of(head.tensors))
_BYTES = ArrayKind("the state", "uint8", "bytes")


def _is_short_list(value: Any) -> bool:
    plain = (int, float, type(None))
    return isinstance(value, list) and len(value) <= 8 and all(type(item) in plain for item in value)


def _floats_of(tensors: Sequence[tuple[str, Sequence[int]]]) -> int:
    size = 0
    for _, shape in tensors:
        size += math.prod(shape)
        if size > _MOST_FLOATS:
            raise RefusedError(f"expected tensors of up to {_MOST_FLOATS} numbers together, got more.")
    return size


class OfModel(Head):
    """A call about the dense parameters of a model."""

    model: ModelNumber


class PullDense(OfModel):
    """The parameters, unless they are those of a version."""

    version: int | None


class DenseVersion(Head):
    """The version of dense parameters."""

    version: int


class PulledDense(DenseVersion):
    """A version, with the parameters if they have changed."""

    tensors: _Tensors | None = None


class DenseGradients(OfModel):
    """Gradients of dense parameters, of a version."""

    tensors: _Tensors
    version: int
    lr: _Rate


class PushDense(DenseGradients):
    """Gradients, with a number by which they are applied once."""

    trainer: str
    sequence: int


class PushedDense(Head):
    """What became of gradients."""

    answer: _Answer


class StageDense(DenseGradients):
    """Gradients for a step of an elastic run."""

    step: int


class NextSequence(OfModel):
    """A request for the number of a trainer's next push."""

    trainer: str


class NumberOfPush(Head):
    """The number of a trainer's next push."""

    sequence: int


class LoadDenseState(OfModel):
    """A state to load."""

    first: bool = False


def _check_tensors(head: DenseGradients, arrays: Sequence[Array]) -> None:
    expect_distinct("the tensors", [name for name, _ in head.tensors])


PULL_DENSE = Call(
    "pull_dense",
    PullDense,
    answer=PulledDense,
    answers=[OptionalArrays(lambda answer: answer.tensors is not None, [_FLAT])],
)
PUSH_DENSE = Call("push_dense", PushDense, [_FLAT], answer=PushedDense, rule=_check_tensors)
STAGE_DENSE = Call(  # of an elastic run: a commit applies them
    "stage_dense", StageDense, [_FLAT], answer=DenseVersion, rule=_check_tensors
)
NEXT_SEQUENCE = Call("next_sequence", NextSequence, answer=NumberOfPush)
FLUSH_DENSE = Call("flush_dense", OfModel, answer=DenseVersion)
DENSE_STATE = Call("dense_state", OfModel, answers=[_BYTES])
LOAD_DENSE_STATE = Call("load_dense_state", LoadDenseState, [_BYTES], answer=DenseVersion)
DENSE_CALLS = table_of(
    PULL_DENSE, PUSH_DENSE, STAGE_DENSE, NEXT_SEQUENCE, FLUSH_DENSE, DENSE_STATE, LOAD_DENSE_STATE
)


# The calls of an elastic run about steps and members: commit, drop, fence, abandon, progress, members
# and tally.
#
# The trainers of an elastic run are *members*, each with a number that is never used again. Their pushes are
# staged, and a commit says which of them a step consists of; see `elastic_batches.py` of the server.


_MOST_PARTS = 2**16
_MOST_MEMBERS = 2**16
_MOST_ACK = 2**18  # characters as JSON


def _is_small(value: Any) -> bool:
    return len(json.dumps(value)) <= _MOST_ACK


_Ack = Annotated[Any, Plain(_is_small, f"JSON of up to {_MOST_ACK} characters")]
_CommitParts = Annotated[list[tuple[MemberNumber, int]], Length(_MOST_PARTS)]  # numbers of their pushes
_CountName = Annotated[str, Text(40)]
_Counts = Annotated[dict[_CountName, int], Length(17)]


class Commit(Head):
    """A step, and the pushes that it consists of."""

    step: int
    parts: _CommitParts
    scale: Float32
    ack: _Ack
    member: MemberNumber | None = None  # in mode async, whose step it is; elsewhere steps are of all members
    dense: Annotated[Sequence[ModelNumber], Length(64)] = ()  # models whose gradients are staged
    counts: Annotated[Mapping[_CountName, int], Length(16)] = {}  # to add to the tally


class CommitAnswer(Head):
    """The tally after a commit, in mode async."""

    tally: _Counts | None = None
    meeting: int | None = None


class TallyAnswer(Head):
    """What was committed by all members, and the number of the next meeting."""

    tally: _Counts
    meeting: int


class Drop(Head):
    """A step that did not happen, and whose it was in mode async."""

    step: int
    member: MemberNumber | None = None


class OfMember(Head):
    """A call about a member."""

    member: MemberNumber


class RoundNumber(Head):
    """The round of a group of trainers."""

    round: int


class MemberNumbers(Head):
    """The members that have trained."""

    members: Annotated[list[MemberNumber], Length(_MOST_MEMBERS)]


class ProgressOf(Head):
    """A request for progress, in mode async that of a member."""

    member: MemberNumber | None = None


class ProgressAnswer(Head):
    """The last step that is committed, and what is staged: step, member and number of each push."""

    committed: int | None  # null: no step of this run
    ack: _Ack
    staged: Annotated[list[tuple[int, MemberNumber, int]], Length(_MOST_PARTS)]
    commit: Commit | None = None  # the last one, in mode async


class Meeting(Head):
    """The number of a meeting to which all members are to come."""

    meeting: int


def check_commit(commit: Commit | None) -> None:
    """A RefusedError if a push occurs twice."""
    if commit is not None:
        expect_distinct("the parts of a commit", commit.parts)
        expect_distinct("the models of a commit", commit.dense)


COMMIT = Call(
    "commit",
    Commit,
    answer=CommitAnswer,
    rule=lambda commit, arrays: check_commit(commit),
)
DROP = Call("drop", Drop)
FENCE = Call("fence", OfMember)
ABANDON = Call("abandon", OfMember)
MEMBERS_IN_ROUND = Call("members", RoundNumber, answer=MemberNumbers)
PROGRESS = Call("progress", ProgressOf, answer=ProgressAnswer)
TALLY = Call("tally", Meeting, answer=TallyAnswer)
COMMIT_CALLS = table_of(COMMIT, DROP, FENCE, ABANDON, MEMBERS_IN_ROUND, PROGRESS, TALLY)


class ServerHello(RunHello):
    """What a trainer says to a parameter server."""

    server: Index
    worker: Index | None = None
    divisor: Count | None = None


# The commit of an elastic run that is executed before the call itself.
_CommitBefore = Annotated[Commit | None, Nullable(Commit)]
_Size = Annotated[int, Integer(0, 2**63)]
_ROWS = [
    ArrayKind("keys", "int64", "n"),
    ArrayKind("vectors", "float32", "n", ANY),
    ArrayKind("state", "float32", "n", ANY),
    ArrayKind("counts", "uint32", "n"),
    ArrayKind("last_steps", "uint32", "n"),
]
_Passes = Annotated[list[Annotated[int, Integer(0, 1023)]], Length(1024)]
_Trainers = Annotated[dict[Annotated[str, Text(20)], int], Length(2**20)]  # a number for each trainer
_FILE = {"name": FilePath, "bytes": _Size, "checksum": Text(100)}
_SHARE = Fields(
    {
        "state": Integer(0, 2**32),
        "parts": ListOf(Fields({**_FILE, "rows": int, "erased": int, "first": Integer(0, 2**64)})),
        "extra": Nullable(Fields(_FILE)),
        "updates": Fields({"run": str, "store": int, "trainers": _Trainers}),
    }
)


def expect_trainer(hello: RunHello) -> None:
    """A RefusedError unless a trainer's number fits its run; that of an elastic run may be any."""
    trainer, trainers, elastic = hello.trainer, hello.trainers, hello.elastic
    if elastic != (trainers == 0):
        expected = "0, for any number, in an elastic run" if elastic else "at least 1 unless it is elastic"
        raise RefusedError(f"expected trainers to be {expected}, got {trainers}.")
    if not elastic and trainer >= trainers:
        raise RefusedError(f"expected a trainer from 0 to {trainers - 1}, got {trainer}.")


class Done(Head):
    """The store that a call is about, and the lookups that its trainer is done with."""

    store: int
    done: list[int]


class PullHead(Done):
    """The tables of a lookup, and the number of keys of each."""

    batch: int
    tables: Annotated[list[TableName], Length(MOST_TABLES, 1)]
    counts: Annotated[list[Annotated[int, Integer(0, 2**32)]], Length(MOST_TABLES)]
    training: bool
    step: Step
    now: float
    wire: FloatType
    commit: _CommitBefore = None


class PushedBatches(Done):
    """The lookups whose gradients follow, and how tables are updated."""

    sequence: int
    batches: Annotated[list[int], Length(1024, 1)]
    rules: Rules
    steps: Steps
    skipped: TableNames
    complete: bool
    wire: FloatType
    mine: _Passes | None = None
    step: int | None = None  # in an elastic run

    @property
    def positions(self) -> Sequence[int]:
        """The positions in the push of the backward passes that the call contains."""
        return range(len(self.batches)) if self.mine is None else self.mine


class PushHead(PushedBatches):
    """Gradients for a server."""

    commit: _CommitBefore = None


class Withdraw(Head):
    """Lookups whose batches will not be trained."""

    store: int
    batches: list[int]


def _check_pull(head: PullHead, arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head.tables)
    check_commit(head.commit)


def _keys_of_pull(head: PullHead) -> int:
    tables, counts = head.tables, head.counts
    if len(counts) != len(tables):
        raise RefusedError(f"expected a number of keys for each of {len(tables)} tables, got {len(counts)}.")
    return words(sum(counts))


def check_passes(head: PushedBatches) -> None:
    """Check that each pass is one of the push, once; tables with rules have steps, and are not skipped."""
    expect_distinct("the passes", head.positions)
    for index in head.positions:
        if index >= len(head.batches):
            raise RefusedError(f"expected one of {len(head.batches)} passes, got number {index}.")
    if not head.positions:
        raise RefusedError("expected the gradients of some batches, got none.")
    expect_same_names("rules", head.rules, "steps", head.steps)
    expect_distinct("the tables with rules and the skipped tables", [*head.rules, *head.skipped])


def _check_push(head: PushHead, arrays: Sequence[Array]) -> None:
    check_passes(head)
    check_commit(head.commit)


PULL = Call(
    "pull",
    PullHead,
    [ArrayKind("keys and uses", "int64", _keys_of_pull)],
    answers=[ArrayKind("vectors", wire_dtype, ANY)],
    rule=_check_pull,
)
PUSH = Call(
    "push",
    PushHead,
    [ForEach(lambda head: len(head.positions), [ArrayKind("gradients", wire_dtype, ANY)])],
    rule=_check_push,
)
WITHDRAW = Call("withdraw", Withdraw)


class OfTable(Head):
    """A call about a table."""

    table: TableName


class AddTable(Head):
    """A table to add."""

    spec: TableSpec


class SetState(OfTable):
    """The optimizer state that new rows of a table get."""

    initial: RowState
    fresh: bool


class OfTables(Head):
    """A call about several tables."""

    tables: TableNames


class Lookup(OfTables):
    """Tables whose keys are looked up."""

    training: bool
    step: Step
    now: float


class Apply(Head):
    """The rules and steps of updates, and the number of pushes by table."""

    rules: Rules
    steps: Steps
    numbers: Annotated[dict[TableName, Annotated[int, Integer(0, 512)]], Length(MOST_TABLES)]


class Evict(OfTable):
    """The moment at which rows are evicted."""

    step: Step
    now: float


class RowCount(Head):
    """A number of rows."""

    rows: int


class TableVersion(Head):
    """The version of a table."""

    version: _Size


class EvictedSince(OfTable):
    """A version, after which keys were evicted."""

    version: _Size


class SnapshotHead(OfTable):
    """A part of a table's rows."""

    part: int
    parts: Count


class Stats(Head):
    """The counters of tables."""

    stats: Annotated[dict[TableName, Annotated[dict[str, _Size], Length(64)]], Length(MOST_TABLES)]


def _check_tables(head: OfTables, arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head.tables)


def _check_apply(head: Apply, arrays: Sequence[Array]) -> None:
    expect_same_names("rules", head.rules, "steps", head.steps)
    expect_same_names("rules", head.rules, "numbers", head.numbers)


def _check_part(head: SnapshotHead, arrays: Sequence[Array]) -> None:
    if head.part >= head.parts:
        raise RefusedError(f"expected a part from 0 to {head.parts - 1}, got {head.part}.")


ADD_TABLE = Call("add_table", AddTable)
SET_STATE = Call("set_state", SetState)
LOOKUP = Call(
    "lookup",
    Lookup,
    [
        ForEach(
            lambda head: len(head.tables),
            [ArrayKind("keys", "int64", "n"), ArrayKind("counts", "uint32", "n")],
        )
    ],
    answers=[ForEach(lambda answer: len(answer.tables), [ArrayKind("vectors", "float32", ANY, ANY)])],
    rule=_check_tables,
)
APPLY = Call(
    "apply",
    Apply,
    [
        ForEach(
            lambda head: sum(head.numbers.values()),
            [ArrayKind("keys", "int64", "n"), ArrayKind("gradients", "float32", "n", ANY)],
        )
    ],
    rule=_check_apply,
)
SKIP = Call("skip", OfTable)
EVICT = Call("evict", Evict, answer=RowCount)
ERASE = Call("erase", OfTable, [ArrayKind("keys", "int64", "n")], answer=RowCount)
CLEAR = Call("clear", OfTable)
VERSION = Call("version", OfTable, answer=TableVersion)
EVICTED_SINCE = Call("evicted_since", EvictedSince, answers=[ArrayKind("keys", "int64", "n")])
SNAPSHOT = Call("snapshot", SnapshotHead, answers=_ROWS, rule=_check_part)
LOAD = Call("load", OfTable, _ROWS)
STATS = Call("stats", OfTables, answer=Stats, rule=_check_tables)
TABLE_CALLS = table_of(
    *(ADD_TABLE, SET_STATE, LOOKUP, APPLY, SKIP, EVICT, ERASE, CLEAR),
    *(VERSION, EVICTED_SINCE, SNAPSHOT, LOAD, STATS),
)


# How a table is saved, and how it is loaded.
_SAVED = Fields({"optimizer": Nullable(str), "parts": Count, "delta": bool, "base": Nullable(str)})
_FILLED = Fields({"keep": bool, "initial": RowState, "extra": bool})


class CaptureHead(OfTables):
    """The tables of a capture, and what it contains."""

    capture: int
    parts: Annotated[dict[TableName, Count], Length(MOST_TABLES)]
    since: int | None
    track: bool
    store: int
    used: Annotated[list[list[int]], Length(2**20)]  # by trainer: lookups trained without a push


class Save(Head):
    """How a capture is written into a folder."""

    capture: int
    folder: FilePath
    store: int
    tables: Annotated[dict[TableName, Annotated[dict[str, Any], _SAVED]], Length(MOST_TABLES)]
    writers: Annotated[int, Integer(1, 256)]


class SavedShares(Head):
    """What a server wrote of each table."""

    shares: Annotated[dict[TableName, Annotated[dict[str, Any], _SHARE]], Length(MOST_TABLES)]


class CloseCapture(Head):
    """A capture that is not needed any more."""

    capture: int


class Fill(Head):
    """A checkpoint, and how its tables are loaded."""

    path: FilePath
    tables: Annotated[dict[TableName, Annotated[dict[str, Any], _FILLED]], Length(MOST_TABLES)]


class DamagedFiles(Head):
    """Files, and what is wrong with each."""

    damaged: list[tuple[Annotated[str, Text(8192)], Annotated[str, Text(8192)]]]


class Folder(Head):
    """A folder for checkpoints."""

    folder: FilePath


class Restore(Folder):
    """The tables that a restarted server must have."""

    tables: DeclaredTables
    unless_tables: bool = False


class OfStore(Head):
    """A call about a store."""

    store: int


class Updates(Head):
    """How many updates of each trainer tables contain."""

    trainers: _Trainers


def _check_capture(head: CaptureHead, arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head.tables)
    expect_same_names("tables", dict.fromkeys(head.tables), "parts", head.parts)


CAPTURE = Call("capture", CaptureHead, rule=_check_capture)
SAVE = Call("save", Save, answer=SavedShares)
CLOSE_CAPTURE = Call("close_capture", CloseCapture)
FILL = Call("fill", Fill, answer=DamagedFiles)
CHECK_FOLDER = Call("check_folder", Folder)
RESTORE = Call("restore", Restore, rule=lambda head, arrays: expect_declared_names(head.tables))
UPDATES = Call("updates", OfStore, answer=Updates)
DESCRIBE = Call("describe", answer=Plain())

SERVER_CALLS = {
    **table_of(PULL, PUSH, WITHDRAW),
    **TABLE_CALLS,
    **table_of(CAPTURE, SAVE, CLOSE_CAPTURE, FILL, CHECK_FOLDER, RESTORE, UPDATES, DESCRIBE),
    **DENSE_CALLS,
    **COMMIT_CALLS,
}
