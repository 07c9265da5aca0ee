"""The calls of a parameter server about rows; those about dense parameters are in `dense.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.dense import DENSE_CALLS
from karvan.protocol.step_commits import COMMIT, COMMIT_CALLS, check_commit
from karvan.protocol.values import (
    DECLARED,
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
from karvan.wire.schema.calls import ANY, ArrayKind, Call, ForEach, table_of
from karvan.wire.schema.kinds import Boolean, Fields, Integer, ListOf, MapOf, Nullable, Plain, Text, TupleOf

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
