"""The calls of a parameter server about rows, dense parameters and commits of steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.values import (
    DECLARED,
    MEMBER,
    MODEL,
    MOST_TABLES,
    NOW,
    NUMBER,
    PATH,
    RULES,
    SPEC,
    STATE,
    STEP,
    STEPS,
    TABLE,
    TABLES,
    WIRE,
    DeclaredTable,
    RunHello,
    expect_declared_names,
    expect_distinct,
    expect_same_names,
    wire_dtype,
    words,
)
from karvan.wire.message import Array, RefusedError
from karvan.wire.schema import (
    ANY,
    FLOAT32_MAX,
    ArrayKind,
    Boolean,
    Call,
    Fields,
    Float,
    ForEach,
    Head,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OptionalArrays,
    Plain,
    Struct,
    Text,
    TupleOf,
    field,
    optional,
    table_of,
)

# The calls of trainers about a server's dense parameters; see `karvan.cluster.parameter_server`.


_NAME = Text(1000)
_TRAINER = Text(200)
# The names and shapes of tensors that are stored one after the other in one array.
_TENSORS = ListOf(TupleOf(_NAME, ListOf(Integer(0, 2**48), 32)), 2**16)
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

    model: int = field(MODEL)


class PullDense(OfModel):
    """The parameters, unless they are those of a version."""

    version: int | None = field(Nullable(NUMBER))


class DenseVersion(Head):
    """The version of dense parameters."""

    version: int = field(NUMBER)


class PulledDense(DenseVersion):
    """A version, with the parameters if they have changed."""

    tensors: list[tuple[str, list[int]]] | None = optional(_TENSORS)


class DenseGradients(OfModel):
    """Gradients of dense parameters, of a version."""

    tensors: list[tuple[str, list[int]]] = field(_TENSORS)
    version: int = field(NUMBER)
    lr: float | None = field(RATE)


class PushDense(DenseGradients):
    """Gradients, with a number by which they are applied once."""

    trainer: str = field(_TRAINER)
    sequence: int = field(NUMBER)


class PushedDense(Head):
    """What became of gradients."""

    answer: tuple[bool, int, bool, int, str] = field(ANSWER)


class StageDense(DenseGradients):
    """Gradients for a step of an elastic run."""

    step: int = field(NUMBER)


class NextSequence(OfModel):
    """A request for the number of a trainer's next push."""

    trainer: str = field(_TRAINER)


class NumberOfPush(Head):
    """The number of a trainer's next push."""

    sequence: int = field(NUMBER)


class LoadDenseState(OfModel):
    """A state to load."""

    first: bool = optional(Boolean(), default=False)


def _check_tensors(head: DenseGradients, arrays: Sequence[Array]) -> None:
    names = [name for name, _ in head.tensors]
    if len(set(names)) != len(names):
        expect_distinct("the tensors", names)


PULL_DENSE = Call(
    "pull_dense",
    Struct(PullDense),
    answer=Struct(PulledDense),
    answers=[OptionalArrays(lambda answer: answer.tensors is not None, [_FLAT])],
)
PUSH_DENSE = Call("push_dense", Struct(PushDense), [_FLAT], answer=Struct(PushedDense), rule=_check_tensors)
STAGE_DENSE = Call(  # of an elastic run: a commit applies them
    "stage_dense", Struct(StageDense), [_FLAT], answer=Struct(DenseVersion), rule=_check_tensors
)
NEXT_SEQUENCE = Call("next_sequence", Struct(NextSequence), answer=Struct(NumberOfPush))
FLUSH_DENSE = Call("flush_dense", Struct(OfModel), answer=Struct(DenseVersion))
DENSE_STATE = Call("dense_state", Struct(OfModel), answers=[_BYTES])
LOAD_DENSE_STATE = Call("load_dense_state", Struct(LoadDenseState), [_BYTES], answer=Struct(DenseVersion))
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


_ACK = Plain(_is_small, f"JSON of up to {_MOST_ACK} characters")
_COMMIT_PARTS = ListOf(TupleOf(MEMBER, NUMBER), _MOST_PARTS)  # members, and the numbers of their pushes
_COUNTS = MapOf(NUMBER, 17, Text(40))


class Commit(Head):
    """A step, and the pushes that it consists of."""

    step: int = field(NUMBER)
    parts: list[tuple[int, int]] = field(_COMMIT_PARTS)
    scale: float = field(Float(-FLOAT32_MAX, FLOAT32_MAX))
    ack: Any = field(_ACK)
    member: int | None = optional(
        MEMBER
    )  # in mode async, whose step it is; elsewhere steps are of all members
    dense: Sequence[int] = optional(ListOf(MODEL, 64), default=())  # models whose gradients are staged
    counts: Mapping[str, int] = optional(MapOf(NUMBER, 16, Text(40)), default={})  # to add to the tally


class CommitAnswer(Head):
    """The tally after a commit, in mode async."""

    tally: dict[str, int] | None = optional(_COUNTS)
    meeting: int | None = optional(NUMBER)


class TallyAnswer(Head):
    """What was committed by all members, and the number of the next meeting."""

    tally: dict[str, int] = field(_COUNTS)
    meeting: int = field(NUMBER)


class Drop(Head):
    """A step that did not happen, and whose it was in mode async."""

    step: int = field(NUMBER)
    member: int | None = optional(MEMBER)


class OfMember(Head):
    """A call about a member."""

    member: int = field(MEMBER)


class RoundNumber(Head):
    """The round of a group of trainers."""

    round: int = field(NUMBER)


class MemberNumbers(Head):
    """The members that have trained."""

    members: list[int] = field(ListOf(MEMBER, _MOST_MEMBERS))


class ProgressOf(Head):
    """A request for progress, in mode async that of a member."""

    member: int | None = optional(MEMBER)


class ProgressAnswer(Head):
    """The last step that is committed, and what is staged: step, member and number of each push."""

    committed: int | None = field(Nullable(NUMBER))  # null: no step of this run
    ack: Any = field(_ACK)
    staged: list[tuple[int, int, int]] = field(ListOf(TupleOf(NUMBER, MEMBER, NUMBER), _MOST_PARTS))
    commit: Commit | None = optional(Struct(Commit))  # the last one, in mode async


class Meeting(Head):
    """The number of a meeting to which all members are to come."""

    meeting: int = field(NUMBER)


def check_commit(commit: Commit | None) -> None:
    """A RefusedError if a push occurs twice."""
    if commit is not None:
        expect_distinct("the parts of a commit", commit.parts)
        expect_distinct("the models of a commit", commit.dense)


COMMIT = Call(
    "commit",
    Struct(Commit),
    answer=Struct(CommitAnswer),
    rule=lambda commit, arrays: check_commit(commit),
)
DROP = Call("drop", Struct(Drop))
FENCE = Call("fence", Struct(OfMember))
ABANDON = Call("abandon", Struct(OfMember))
MEMBERS_IN_ROUND = Call("members", Struct(RoundNumber), answer=Struct(MemberNumbers))
PROGRESS = Call("progress", Struct(ProgressOf), answer=Struct(ProgressAnswer))
TALLY = Call("tally", Struct(Meeting), answer=Struct(TallyAnswer))
COMMIT_CALLS = table_of(COMMIT, DROP, FENCE, ABANDON, MEMBERS_IN_ROUND, PROGRESS, TALLY)


class ServerHello(RunHello):
    """What a trainer says to a parameter server."""

    server: int = field(Integer(0, 2**20))
    worker: int | None = optional(Integer(0, 2**20))
    divisor: int | None = optional(Integer(1, 2**20))


_BATCHES = ListOf(NUMBER)  # numbers of lookups
_COMMIT = Nullable(Struct(Commit))  # of an elastic run: executed before the call itself
_PARTS = Integer(1, 2**20)
_SIZE = Integer(0, 2**63)
_ROWS = [
    ArrayKind("keys", "int64", "n"),
    ArrayKind("vectors", "float32", "n", ANY),
    ArrayKind("state", "float32", "n", ANY),
    ArrayKind("counts", "uint32", "n"),
    ArrayKind("last_steps", "uint32", "n"),
]
_TRAINERS = MapOf(NUMBER, 2**20, Text(20))  # a number for each trainer
_FILE = {"name": PATH, "bytes": _SIZE, "checksum": Text(100)}
_SHARE = Fields(
    {
        "state": Integer(0, 2**32),
        "parts": ListOf(Fields({**_FILE, "rows": NUMBER, "erased": NUMBER, "first": Integer(0, 2**64)})),
        "extra": Nullable(Fields(_FILE)),
        "updates": Fields({"run": Text(200), "store": NUMBER, "trainers": _TRAINERS}),
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

    store: int = field(NUMBER)
    done: list[int] = field(_BATCHES)


class PullHead(Done):
    """The tables of a lookup, and the number of keys of each."""

    batch: int = field(NUMBER)
    tables: list[str] = field(ListOf(TABLE, MOST_TABLES, 1))
    counts: list[int] = field(ListOf(Integer(0, 2**32), MOST_TABLES))
    training: bool = field(Boolean())
    step: int = field(STEP)
    now: float = field(NOW)
    wire: str = field(WIRE)
    commit: Commit | None = optional(_COMMIT)


class PushedBatches(Done):
    """The lookups whose gradients follow, and how tables are updated."""

    sequence: int = field(NUMBER)
    batches: list[int] = field(ListOf(NUMBER, 1024, 1))
    rules: dict[str, dict[str, Any]] = field(RULES)
    steps: dict[str, int] = field(STEPS)
    skipped: list[str] = field(TABLES)
    complete: bool = field(Boolean())
    wire: str = field(WIRE)
    mine: list[int] | None = optional(ListOf(Integer(0, 1023), 1024))  # passes in the call; None: all
    step: int | None = optional(NUMBER)  # in an elastic run

    @property
    def positions(self) -> Sequence[int]:
        """The positions in the push of the backward passes that the call contains."""
        return range(len(self.batches)) if self.mine is None else self.mine


class PushHead(PushedBatches):
    """Gradients for a server."""

    commit: Commit | None = optional(_COMMIT)


class Withdraw(Head):
    """Lookups whose batches will not be trained."""

    store: int = field(NUMBER)
    batches: list[int] = field(_BATCHES)


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
    Struct(PullHead),
    [ArrayKind("keys and uses", "int64", _keys_of_pull)],
    answers=[ArrayKind("vectors", wire_dtype, ANY)],
    rule=_check_pull,
)
PUSH = Call(
    "push",
    Struct(PushHead),
    [ForEach(lambda head: len(head.positions), [ArrayKind("gradients", wire_dtype, ANY)])],
    rule=_check_push,
)
WITHDRAW = Call("withdraw", Struct(Withdraw))


class OfTable(Head):
    """A call about a table."""

    table: str = field(TABLE)


class AddTable(Head):
    """A table to add."""

    spec: dict[str, Any] = field(SPEC)


class SetState(OfTable):
    """The optimizer state that new rows of a table get."""

    initial: list[float] = field(STATE)
    fresh: bool = field(Boolean())


class OfTables(Head):
    """A call about several tables."""

    tables: list[str] = field(TABLES)


class Lookup(OfTables):
    """Tables whose keys are looked up."""

    training: bool = field(Boolean())
    step: int = field(STEP)
    now: float = field(NOW)


class Apply(Head):
    """The rules and steps of updates, and the number of pushes by table."""

    rules: dict[str, dict[str, Any]] = field(RULES)
    steps: dict[str, int] = field(STEPS)
    numbers: dict[str, int] = field(MapOf(Integer(0, 512), MOST_TABLES, TABLE))


class Evict(OfTable):
    """The moment at which rows are evicted."""

    step: int = field(STEP)
    now: float = field(NOW)


class RowCount(Head):
    """A number of rows."""

    rows: int = field(NUMBER)


class TableVersion(Head):
    """The version of a table."""

    version: int = field(_SIZE)


class EvictedSince(OfTable):
    """A version, after which keys were evicted."""

    version: int = field(_SIZE)


class SnapshotHead(OfTable):
    """A part of a table's rows."""

    part: int = field(NUMBER)
    parts: int = field(_PARTS)


class Stats(Head):
    """The counters of tables."""

    stats: dict[str, dict[str, int]] = field(MapOf(MapOf(_SIZE, 64), MOST_TABLES, TABLE))


def _check_tables(head: OfTables, arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head.tables)


def _check_apply(head: Apply, arrays: Sequence[Array]) -> None:
    expect_same_names("rules", head.rules, "steps", head.steps)
    expect_same_names("rules", head.rules, "numbers", head.numbers)


def _check_part(head: SnapshotHead, arrays: Sequence[Array]) -> None:
    if head.part >= head.parts:
        raise RefusedError(f"expected a part from 0 to {head.parts - 1}, got {head.part}.")


ADD_TABLE = Call("add_table", Struct(AddTable))
SET_STATE = Call("set_state", Struct(SetState))
LOOKUP = Call(
    "lookup",
    Struct(Lookup),
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
    Struct(Apply),
    [
        ForEach(
            lambda head: sum(head.numbers.values()),
            [ArrayKind("keys", "int64", "n"), ArrayKind("gradients", "float32", "n", ANY)],
        )
    ],
    rule=_check_apply,
)
SKIP = Call("skip", Struct(OfTable))
EVICT = Call("evict", Struct(Evict), answer=Struct(RowCount))
ERASE = Call("erase", Struct(OfTable), [ArrayKind("keys", "int64", "n")], answer=Struct(RowCount))
CLEAR = Call("clear", Struct(OfTable))
VERSION = Call("version", Struct(OfTable), answer=Struct(TableVersion))
EVICTED_SINCE = Call("evicted_since", Struct(EvictedSince), answers=[ArrayKind("keys", "int64", "n")])
SNAPSHOT = Call("snapshot", Struct(SnapshotHead), answers=_ROWS, rule=_check_part)
LOAD = Call("load", Struct(OfTable), _ROWS)
STATS = Call("stats", Struct(OfTables), answer=Struct(Stats), rule=_check_tables)
TABLE_CALLS = table_of(
    *(ADD_TABLE, SET_STATE, LOOKUP, APPLY, SKIP, EVICT, ERASE, CLEAR),
    *(VERSION, EVICTED_SINCE, SNAPSHOT, LOAD, STATS),
)


class CaptureHead(OfTables):
    """The tables of a capture, and what it contains."""

    capture: int = field(NUMBER)
    parts: dict[str, int] = field(MapOf(_PARTS, MOST_TABLES, TABLE))
    since: int | None = field(Nullable(NUMBER))
    track: bool = field(Boolean())
    store: int = field(NUMBER)
    used: list[list[int]] = field(ListOf(_BATCHES, 2**20))  # by trainer: lookups trained without a push


class Save(Head):
    """How a capture is written into a folder."""

    capture: int = field(NUMBER)
    folder: str = field(PATH)
    store: int = field(NUMBER)
    tables: dict[str, dict[str, Any]] = field(
        MapOf(
            Fields(
                {
                    "optimizer": Nullable(Text(200)),
                    "parts": _PARTS,
                    "delta": Boolean(),
                    "base": Nullable(Text(200)),
                }
            ),
            MOST_TABLES,
            TABLE,
        )
    )
    writers: int = field(Integer(1, 256))


class SavedShares(Head):
    """What a server wrote of each table."""

    shares: dict[str, dict[str, Any]] = field(MapOf(_SHARE, MOST_TABLES, TABLE))


class CloseCapture(Head):
    """A capture that is not needed any more."""

    capture: int = field(NUMBER)


class Fill(Head):
    """A checkpoint, and how its tables are loaded."""

    path: str = field(PATH)
    tables: dict[str, dict[str, Any]] = field(
        MapOf(Fields({"keep": Boolean(), "initial": STATE, "extra": Boolean()}), MOST_TABLES, TABLE)
    )


class DamagedFiles(Head):
    """Files, and what is wrong with each."""

    damaged: list[tuple[str, str]] = field(ListOf(TupleOf(Text(8192), Text(8192))))


class Folder(Head):
    """A folder for checkpoints."""

    folder: str = field(PATH)


class Restore(Folder):
    """The tables that a restarted server must have."""

    tables: dict[str, DeclaredTable] = field(DECLARED)
    unless_tables: bool = optional(Boolean(), default=False)


class OfStore(Head):
    """A call about a store."""

    store: int = field(NUMBER)


class Updates(Head):
    """How many updates of each trainer tables contain."""

    trainers: dict[str, int] = field(_TRAINERS)


def _check_capture(head: CaptureHead, arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head.tables)
    expect_same_names("tables", dict.fromkeys(head.tables), "parts", head.parts)


CAPTURE = Call("capture", Struct(CaptureHead), rule=_check_capture)
SAVE = Call("save", Struct(Save), answer=Struct(SavedShares))
CLOSE_CAPTURE = Call("close_capture", Struct(CloseCapture))
FILL = Call("fill", Struct(Fill), answer=Struct(DamagedFiles))
CHECK_FOLDER = Call("check_folder", Struct(Folder))
RESTORE = Call("restore", Struct(Restore), rule=lambda head, arrays: expect_declared_names(head.tables))
UPDATES = Call("updates", Struct(OfStore), answer=Struct(Updates))
DESCRIBE = Call("describe", answer=Plain())

SERVER_CALLS = {
    **table_of(PULL, PUSH, WITHDRAW),
    **TABLE_CALLS,
    **table_of(CAPTURE, SAVE, CLOSE_CAPTURE, FILL, CHECK_FOLDER, RESTORE, UPDATES, DESCRIBE),
    **DENSE_CALLS,
    **COMMIT_CALLS,
}
