"""The calls of an elastic run about steps and members: commit, drop, fence, abandon, progress, members
and tally.

The trainers of an elastic run are *members*, each with a number that is never used again. Their pushes are
staged, and a commit says which of them a step consists of; see `karvan/cluster/parameter_server/elastic`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from karvan.protocol.values import MEMBER, MODEL, NUMBER, expect_distinct
from karvan.wire.message import Array
from karvan.wire.schema.calls import Call, table_of
from karvan.wire.schema.kinds import (
    FLOAT32_MAX,
    Fields,
    Float,
    ListOf,
    MapOf,
    Nullable,
    Plain,
    Text,
    TupleOf,
)

_MOST_PARTS = 2**16
_MOST_MEMBERS = 2**16
_MOST_ACK = 2**18  # characters as JSON


def _is_small(value: Any) -> bool:
    return len(json.dumps(value)) <= _MOST_ACK


_ACK = Plain(_is_small, f"JSON of up to {_MOST_ACK} characters")
_PARTS = ListOf(TupleOf(MEMBER, NUMBER), _MOST_PARTS)  # members, and the numbers of their pushes
# member: in mode async, whose steps are these; in other modes steps are those of all members. dense: models
# whose gradients are staged. counts: what to add to the tally.
COMMIT = Fields(
    {"step": NUMBER, "parts": _PARTS, "scale": Float(-FLOAT32_MAX, FLOAT32_MAX), "ack": _ACK},
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
