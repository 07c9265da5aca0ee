"""Calls of the master: the job, the rendezvous of ranks and the group of trainers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from karvan.protocol.values import GENERATION, INDEX, NUMBER, ROLE
from karvan.wire.errors import RefusedError
from karvan.wire.message import Array
from karvan.wire.schema import (
    ArrayKind,
    Boolean,
    Call,
    Fields,
    Float,
    Head,
    Integer,
    ListOf,
    Nullable,
    OneOf,
    Text,
    table_of,
)

# The calls for the rendezvous of a job's trainers: a key-value store at the registry.
#
# Values are one array of bytes, split by `sizes` of the head. No call waits for a key. Calls that may not be
# executed twice name their `request`, by which a registry that was restarted knows them again.


MOST_KEYS = 1 << 16
LONGEST_KEY = 1024
_KEY = Text(LONGEST_KEY)
_KEYS = ListOf(_KEY, MOST_KEYS)
_INT64 = Integer(-(2**63), 2**63 - 1)
_SIZE = Integer(0, 2**30)
_VALUES = ArrayKind("values", "uint8", lambda head: sum(head["sizes"]))


def pack_values(values: Sequence[bytes]) -> tuple[list[int], list[Array]]:
    """`sizes` of a head and the array of values."""
    return [len(value) for value in values], [np.frombuffer(b"".join(values), np.uint8)]


def unpack_values(head: Head, arrays: Sequence[Array]) -> list[bytes]:
    """The values of a checked call or answer."""
    data, values, start = arrays[0].tobytes(), [], 0
    for size in head["sizes"]:
        values.append(data[start : start + size])
        start += size
    return values


def _check_one_value_per_key(head: Head, arrays: Sequence[Array]) -> None:
    if len(head["keys"]) != len(head["sizes"]):
        raise RefusedError(f"expected {len(head['keys'])} sizes of values, got {len(head['sizes'])}.")


def _generation_and(**fields: Integer | Text | ListOf) -> Fields:
    return Fields({"generation": GENERATION, **fields})


def _once(**fields: Integer | Text | ListOf) -> Fields:
    return Fields({"generation": GENERATION, **fields}, {"request": Text(40, 0)})


RENDEZVOUS_CALLS = table_of(
    Call(
        "store_set",
        _generation_and(keys=_KEYS, sizes=ListOf(_SIZE)),
        [_VALUES],
        rule=_check_one_value_per_key,
    ),
    Call(
        "store_get",  # all of the keys, or none of them
        _generation_and(keys=_KEYS),
        answer=Fields({"present": Boolean(), "sizes": ListOf(_SIZE)}),
        answers=[_VALUES],
    ),
    Call("store_check", _generation_and(keys=_KEYS), answer=Fields({"present": Boolean()})),
    Call("store_add", _once(key=_KEY, amount=_INT64), answer=Fields({"total": _INT64})),
    Call("store_append", _once(key=_KEY, sizes=ListOf(_SIZE, 1, 1)), [_VALUES]),
    Call(
        "store_compare_set",  # the expected value and the desired one; the answer is the value afterwards
        _once(key=_KEY, sizes=ListOf(_SIZE, 2, 2)),
        [_VALUES],
        answer=Fields({"sizes": ListOf(_SIZE, 1, 1)}),
        answers=[_VALUES],
    ),
    Call("store_delete", _once(key=_KEY), answer=Fields({"deleted": Boolean()})),
    Call("store_count", _generation_and(), answer=Fields({"keys": Integer(0, MOST_KEYS)})),
)


# The calls of commands about a running job; `karvan/launch/master/job_service.py` has the protocol.


STATES = ("starting", "running", "stopping")
PROCESS_STATES = ("starting", "running", "silent", "restarting", "done", "ended", "not wanted")

_PROCESS = Fields(
    {
        "role": ROLE,
        "index": INDEX,
        "pid": Nullable(Integer(0, 2**31)),
        "host": Text(300, 0),
        "state": OneOf(*PROCESS_STATES),
        "code": Nullable(Integer(-(2**31))),
        "generation": GENERATION,
        "heartbeat": Nullable(Float(0.0)),
        "activity": Text(300, 0),
    }
)
_WORK = Fields(
    {
        "epoch": NUMBER,
        "epochs": Nullable(Integer(-1)),
        "tasks": NUMBER,
        "done": NUMBER,
        "leased": NUMBER,
        "waiting": NUMBER,
        "records": NUMBER,
        "bad_records": NUMBER,
        "to_predict": NUMBER,
        "export": OneOf("none", "open", "done"),
        "failure": Nullable(Text(20_000, 0)),
    }
)

JOB_CALLS = table_of(
    Call(
        "job_status",
        answer=Fields(
            {
                "job": Text(300),
                "state": OneOf(*STATES),
                "mode": Text(20),
                "generation": GENERATION,
                "master": Integer(0, 2**31),
                "processes": ListOf(_PROCESS),
                "work": Nullable(_WORK),
            }
        ),
    ),
    Call("scale_job", Fields({"trainers": Integer(1, 2**20)})),
    Call("stop_job", Fields({"now": Boolean()})),
)


# The calls about the group of trainers; `karvan/work/trainer_group.py` has the protocol.


MOST_TRAINERS = 4096

_PROCESS_NAME = Text(200)
_MEMBER = Integer(0, 2**31)
_MEMBERS = ListOf(_MEMBER, MOST_TRAINERS)

GROUP_CALLS = table_of(
    Call(
        "enter_group",
        Fields({"process": _PROCESS_NAME}),
        answer=Fields({"member": _MEMBER, "group": Text(100), "run": Text(100)}),
    ),
    Call(
        "join_group",
        Fields({"process": _PROCESS_NAME, "round": NUMBER, "lost": _MEMBERS}),
        answer=Fields({"member": _MEMBER, "round": NUMBER, "members": _MEMBERS, "run": Text(100, 0)}),
    ),
    Call(
        "watch_group",
        Fields({"process": _PROCESS_NAME, "round": NUMBER}),
        answer=Fields({"regroup": Boolean(), "broken": Boolean(), "gone": _MEMBERS, "waiting": _MEMBERS}),
    ),
    Call("settle_group", Fields({"process": _PROCESS_NAME, "round": NUMBER})),
    Call("leave_group", Fields({"process": _PROCESS_NAME})),
)
