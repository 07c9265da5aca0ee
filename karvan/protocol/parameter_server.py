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
    TRAINER_HELLO,
    TRAINER_OPTIONS,
    WIRE,
    expect_declared_names,
    expect_distinct,
    expect_same_names,
    wire_dtype,
    words,
)
from karvan.wire.errors import RefusedError
from karvan.wire.message import Array
from karvan.wire.schema import (
    ANY,
    FLOAT32_MAX,
    ArrayKind,
    Boolean,
    Call,
    Fields,
    Float,
    ForEach,
    Integer,
    Kind,
    ListOf,
    MapOf,
    Nullable,
    OptionalArrays,
    Plain,
    Text,
    TupleOf,
    table_of,
)

# The calls of trainers about a server's dense parameters; see `karvan.cluster.parameter_server`.


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


# The calls of an elastic run about steps and members: commit, drop, fence, abandon, progress, members
# and tally.
#
# The trainers of an elastic run are *members*, each with a number that is never used again. Their pushes are
# staged, and a commit says which of them a step consists of; see `karvan/cluster/parameter_server/elastic`.


_MOST_PARTS = 2**16
_MOST_MEMBERS = 2**16
_MOST_ACK = 2**18  # characters as JSON


def _is_small(value: Any) -> bool:
    return len(json.dumps(value)) <= _MOST_ACK


_ACK = Plain(_is_small, f"JSON of up to {_MOST_ACK} characters")
_COMMIT_PARTS = ListOf(TupleOf(MEMBER, NUMBER), _MOST_PARTS)  # members, and the numbers of their pushes
# member: in mode async, whose steps are these; in other modes steps are those of all members. dense: models
# whose gradients are staged. counts: what to add to the tally.
COMMIT = Fields(
    {"step": NUMBER, "parts": _COMMIT_PARTS, "scale": Float(-FLOAT32_MAX, FLOAT32_MAX), "ack": _ACK},
    {"member": MEMBER, "dense": ListOf(MODEL, 64), "counts": MapOf(NUMBER, 16, Text(40))},
)
_TALLY = {"tally": MapOf(NUMBER, 17, Text(40)), "meeting": NUMBER}  # in mode async


def check_commit(commit: Mapping[str, Any] | None) -> None:
    """A RefusedError if a push occurs twice."""
    if commit is not None:
        expect_distinct("the parts of a commit", commit["parts"])
        expect_distinct("the models of a commit", commit.get("dense", []))


def _check_commit(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    check_commit(head)


COMMIT_CALLS = table_of(
    Call("commit", COMMIT, answer=Fields({}, _TALLY), rule=_check_commit),
    Call("drop", Fields({"step": NUMBER}, {"member": MEMBER})),
    Call("fence", Fields({"member": MEMBER})),
    Call("abandon", Fields({"member": MEMBER})),
    Call("members", Fields({"round": NUMBER}), answer=Fields({"members": ListOf(MEMBER, _MOST_MEMBERS)})),
    Call(
        "progress",
        Fields({}, {"member": MEMBER}),
        answer=Fields(
            {
                "committed": Nullable(NUMBER),  # null: no step of this run
                "ack": _ACK,
                "staged": ListOf(TupleOf(NUMBER, MEMBER, NUMBER), _MOST_PARTS),
            },
            {"commit": COMMIT},  # the last one, in mode async
        ),
    ),
    Call("tally", Fields({"meeting": NUMBER}), answer=Fields(_TALLY)),
)


SERVER_HELLO = Fields(
    {
        **TRAINER_HELLO,
        "trainers": Integer(0, 2**20),  # 0 in an elastic run, whose trainers come and go
        "server": Integer(0, 2**20),
        "servers": Integer(1, 2**20),
    },
    {**TRAINER_OPTIONS, "worker": Integer(0, 2**20), "elastic": Boolean()},
)

_BATCHES = ListOf(NUMBER)  # numbers of lookups
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


def expect_trainer(hello: Mapping[str, Any]) -> None:
    """A RefusedError unless a trainer's number fits its run; that of an elastic run may be any."""
    trainer, trainers, elastic = hello["trainer"], hello["trainers"], hello.get("elastic", False)
    if elastic != (trainers == 0):
        expected = "0, for any number, in an elastic run" if elastic else "at least 1 unless it is elastic"
        raise RefusedError(f"expected trainers to be {expected}, got {trainers}.")
    if not elastic and trainer >= trainers:
        raise RefusedError(f"expected a trainer from 0 to {trainers - 1}, got {trainer}.")


def _check_pull(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head["tables"])
    check_commit(head.get("commit"))


def _keys_of_pull(head: Mapping[str, Any]) -> int:
    tables, counts = head["tables"], head["counts"]
    if len(counts) != len(tables):
        raise RefusedError(f"expected a number of keys for each of {len(tables)} tables, got {len(counts)}.")
    return words(sum(counts))


def passes_of(head: Mapping[str, Any]) -> list[int]:
    """The indices of the backward passes of a push that a call contains."""
    mine: list[int] = head.get("mine", list(range(len(head["batches"]))))
    return mine


def check_passes(head: Mapping[str, Any]) -> None:
    """Check that each pass is one of the push, once; tables with rules have steps, and are not skipped."""
    mine = passes_of(head)
    expect_distinct("the passes", mine)
    for index in mine:
        if index >= len(head["batches"]):
            raise RefusedError(f"expected one of {len(head['batches'])} passes, got number {index}.")
    if not mine:
        raise RefusedError("expected the gradients of some batches, got none.")
    expect_same_names("rules", head["rules"], "steps", head["steps"])
    expect_distinct("the tables with rules and the skipped tables", [*head["rules"], *head["skipped"]])


def _check_push(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    check_passes(head)
    check_commit(head.get("commit"))


def _check_tables(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head["tables"])


def _check_apply(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    expect_same_names("rules", head["rules"], "steps", head["steps"])
    expect_same_names("rules", head["rules"], "numbers", head["numbers"])


def _check_part(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    if head["part"] >= head["parts"]:
        raise RefusedError(f"expected a part from 0 to {head['parts'] - 1}, got {head['part']}.")


def _check_capture(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    expect_distinct("the tables", head["tables"])
    expect_same_names("tables", dict.fromkeys(head["tables"]), "parts", head["parts"])


def _check_restore(head: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    expect_declared_names(head["tables"])


PUSH_FIELDS = {
    "store": NUMBER,
    "sequence": NUMBER,
    "batches": ListOf(NUMBER, 1024, 1),
    "rules": RULES,
    "steps": STEPS,
    "skipped": TABLES,
    "complete": Boolean(),
    "wire": WIRE,
    "done": _BATCHES,
}
_MINE = ListOf(Integer(0, 1023), 1024)
_COMMIT = {"commit": Nullable(COMMIT)}  # of an elastic run: executed before the call itself

_TRAINING = table_of(
    Call(
        "pull",
        Fields(
            {
                "store": NUMBER,
                "batch": NUMBER,
                "tables": ListOf(TABLE, MOST_TABLES, 1),
                "counts": ListOf(Integer(0, 2**32), MOST_TABLES),
                "training": Boolean(),
                "step": STEP,
                "now": NOW,
                "wire": WIRE,
                "done": _BATCHES,
            },
            _COMMIT,
        ),
        [ArrayKind("keys and uses", "int64", _keys_of_pull)],
        answers=[ArrayKind("vectors", wire_dtype, ANY)],
        rule=_check_pull,
    ),
    Call(
        "push",
        Fields(PUSH_FIELDS, {"mine": _MINE, "step": NUMBER, **_COMMIT}),  # step: in an elastic run
        [ForEach(lambda head: len(passes_of(head)), [ArrayKind("gradients", wire_dtype, ANY)])],
        rule=_check_push,
    ),
    Call("withdraw", Fields({"store": NUMBER, "batches": _BATCHES})),
)

_OF_TABLE = Fields({"table": TABLE})

TABLE_CALLS = table_of(
    Call("add_table", Fields({"spec": SPEC})),
    Call("set_state", Fields({"table": TABLE, "initial": STATE, "fresh": Boolean()})),
    Call(
        "lookup",
        Fields({"tables": TABLES, "training": Boolean(), "step": STEP, "now": NOW}),
        [
            ForEach(
                lambda head: len(head["tables"]),
                [ArrayKind("keys", "int64", "n"), ArrayKind("counts", "uint32", "n")],
            )
        ],
        answers=[ForEach(lambda answer: len(answer["tables"]), [ArrayKind("vectors", "float32", ANY, ANY)])],
        rule=_check_tables,
    ),
    Call(
        "apply",
        Fields({"rules": RULES, "steps": STEPS, "numbers": MapOf(Integer(0, 512), MOST_TABLES, TABLE)}),
        [
            ForEach(
                lambda head: sum(head["numbers"].values()),
                [ArrayKind("keys", "int64", "n"), ArrayKind("gradients", "float32", "n", ANY)],
            )
        ],
        rule=_check_apply,
    ),
    Call("skip", _OF_TABLE),
    Call("evict", Fields({"table": TABLE, "step": STEP, "now": NOW}), answer=Fields({"rows": NUMBER})),
    Call("erase", _OF_TABLE, [ArrayKind("keys", "int64", "n")], answer=Fields({"rows": NUMBER})),
    Call("clear", _OF_TABLE),
    Call("version", _OF_TABLE, answer=Fields({"version": _SIZE})),
    Call(
        "evicted_since",
        Fields({"table": TABLE, "version": _SIZE}),
        answers=[ArrayKind("keys", "int64", "n")],
    ),
    Call(
        "snapshot", Fields({"table": TABLE, "part": NUMBER, "parts": _PARTS}), answers=_ROWS, rule=_check_part
    ),
    Call("load", _OF_TABLE, _ROWS),
    Call(
        "stats",
        Fields({"tables": TABLES}),
        answer=Fields({"stats": MapOf(MapOf(_SIZE, 64), MOST_TABLES, TABLE)}),
        rule=_check_tables,
    ),
)

_SAVING = table_of(
    Call(
        "capture",
        Fields(
            {
                "capture": NUMBER,
                "tables": TABLES,
                "parts": MapOf(_PARTS, MOST_TABLES, TABLE),
                "since": Nullable(NUMBER),
                "track": Boolean(),
                "store": NUMBER,
                "used": ListOf(_BATCHES, 2**20),  # by trainer: lookups that are trained without a push
            }
        ),
        rule=_check_capture,
    ),
    Call(
        "save",
        Fields(
            {
                "capture": NUMBER,
                "folder": PATH,
                "store": NUMBER,
                "tables": MapOf(
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
                ),
                "writers": Integer(1, 256),
            }
        ),
        answer=Fields({"shares": MapOf(_SHARE, MOST_TABLES, TABLE)}),
    ),
    Call("close_capture", Fields({"capture": NUMBER})),
    Call(
        "fill",
        Fields(
            {
                "path": PATH,
                "tables": MapOf(
                    Fields({"keep": Boolean(), "initial": STATE, "extra": Boolean()}), MOST_TABLES, TABLE
                ),
            }
        ),
        answer=Fields({"damaged": ListOf(TupleOf(Text(8192), Text(8192)))}),  # files, and their damage
    ),
    Call("check_folder", Fields({"folder": PATH})),
    Call(
        "restore",
        Fields({"tables": DECLARED, "folder": PATH}, {"unless_tables": Boolean()}),
        rule=_check_restore,
    ),
    Call("updates", Fields({"store": NUMBER}), answer=Fields({"trainers": _TRAINERS})),
)

SERVER_CALLS = {
    **_TRAINING,
    **TABLE_CALLS,
    **_SAVING,
    **DENSE_CALLS,
    **COMMIT_CALLS,
    "describe": Call("describe", answer=Plain()),
}
