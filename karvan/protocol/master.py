"""Calls of the master: the job, the rendezvous of ranks and the group of trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from karvan.protocol.values import GENERATION, INDEX, NUMBER, ROLE, Generation
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
    Struct,
    Text,
    field,
    optional,
    table_of,
)

# The calls for the rendezvous of a job's trainers: a key-value store at the registry.
#
# Values are one array of bytes, split by `sizes` of the head. No call waits for a key. Calls that may not be
# executed twice name their `request`, by which a registry that was restarted knows them again.


MOST_KEYS = 1 << 16
LONGEST_KEY = 1024
_KEY = Text(LONGEST_KEY)
_INT64 = Integer(-(2**63), 2**63 - 1)
_SIZE = Integer(0, 2**30)
_SIZES = ListOf(_SIZE)
_ONE_SIZE = ListOf(_SIZE, 1, 1)
_VALUES = ArrayKind("values", "uint8", lambda head: sum(head.sizes))


def pack_values(values: Sequence[bytes]) -> tuple[list[int], list[Array]]:
    """`sizes` of a head and the array of values."""
    return [len(value) for value in values], [np.frombuffer(b"".join(values), np.uint8)]


def unpack_values(sizes: Sequence[int], arrays: Sequence[Array]) -> list[bytes]:
    """The values of a checked call or answer."""
    data, values, start = arrays[0].tobytes(), [], 0
    for size in sizes:
        values.append(data[start : start + size])
        start += size
    return values


class Keys(Generation):
    """Several keys of a generation's store."""

    keys: list[str] = field(ListOf(_KEY, MOST_KEYS))


class SetKeys(Keys):
    """Several keys and the sizes of their values."""

    sizes: list[int] = field(_SIZES)


class Presence(Head):
    """Whether all of the keys exist."""

    present: bool = field(Boolean())


class PresentValues(Presence):
    """The sizes of the values of all keys, if all of them exist."""

    sizes: list[int] = field(_SIZES)


class ChangeKey(Generation):
    """A key of a generation's store that one request changes."""

    key: str = field(_KEY)
    request: str = optional(Text(40, 0), default="")


class AddToKey(ChangeKey):
    """A key and the number that is added to it."""

    amount: int = field(_INT64)


class Total(Head):
    """The sum that a key has."""

    total: int = field(_INT64)


class AppendToKey(ChangeKey):
    """A key and the size of the value that is appended to it."""

    sizes: list[int] = field(_ONE_SIZE)


class CompareSetKey(ChangeKey):
    """A key and the sizes of the expected value and of the desired one."""

    sizes: list[int] = field(ListOf(_SIZE, 2, 2))


class OneValue(Head):
    """The size of a value."""

    sizes: list[int] = field(_ONE_SIZE)


class Deleted(Head):
    """Whether there was such a key."""

    deleted: bool = field(Boolean())


class KeyCount(Head):
    """The number of keys."""

    keys: int = field(Integer(0, MOST_KEYS))


def _check_one_value_per_key(head: SetKeys, arrays: Sequence[Array]) -> None:
    if len(head.keys) != len(head.sizes):
        raise RefusedError(f"expected {len(head.keys)} sizes of values, got {len(head.sizes)}.")


STORE_SET = Call("store_set", Struct(SetKeys), [_VALUES], rule=_check_one_value_per_key)
# All of the keys, or none of them.
STORE_GET = Call("store_get", Struct(Keys), answer=Struct(PresentValues), answers=[_VALUES])
STORE_CHECK = Call("store_check", Struct(Keys), answer=Struct(Presence))
STORE_ADD = Call("store_add", Struct(AddToKey), answer=Struct(Total))
STORE_APPEND = Call("store_append", Struct(AppendToKey), [_VALUES])
# The answer is the value afterwards.
STORE_COMPARE_SET = Call(
    "store_compare_set", Struct(CompareSetKey), [_VALUES], answer=Struct(OneValue), answers=[_VALUES]
)
STORE_DELETE = Call("store_delete", Struct(ChangeKey), answer=Struct(Deleted))
STORE_COUNT = Call("store_count", Struct(Generation), answer=Struct(KeyCount))
RENDEZVOUS_CALLS = table_of(
    STORE_SET,
    STORE_GET,
    STORE_CHECK,
    STORE_ADD,
    STORE_APPEND,
    STORE_COMPARE_SET,
    STORE_DELETE,
    STORE_COUNT,
)


# The calls of commands about a running job; `karvan/launch/job_calls.py` has the protocol.


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


class JobStatus(Head):
    """The state of a job, of its processes and of its leased work."""

    job: str = field(Text(300))
    state: str = field(OneOf(*STATES))
    mode: str = field(Text(20))
    generation: int = field(GENERATION)
    master: int = field(Integer(0, 2**31))
    processes: list[dict[str, Any]] = field(ListOf(_PROCESS))
    work: dict[str, Any] | None = field(Nullable(_WORK))


class ScaleJob(Head):
    """The number of trainers that a job shall have."""

    trainers: int = field(Integer(1, 2**20))


class StopJob(Head):
    """Whether all processes are killed at once."""

    now: bool = field(Boolean())


JOB_STATUS = Call("job_status", answer=Struct(JobStatus))
SCALE_JOB = Call("scale_job", Struct(ScaleJob))
STOP_JOB = Call("stop_job", Struct(StopJob))
JOB_CALLS = table_of(JOB_STATUS, SCALE_JOB, STOP_JOB)


# The calls about the group of trainers; `karvan/work/trainer_group.py` has the protocol.


MOST_TRAINERS = 4096

_MEMBER = Integer(0, 2**31)
_MEMBERS = ListOf(_MEMBER, MOST_TRAINERS)


class GroupProcess(Head):
    """The name of a trainer's process."""

    process: str = field(Text(200))


class EnteredGroup(Head):
    """The number of a trainer, and the names of its group and run."""

    member: int = field(_MEMBER)
    group: str = field(Text(100))
    run: str = field(Text(100))


class ProcessRound(GroupProcess):
    """A trainer's process, and the round that it is in."""

    round: int = field(NUMBER)


class JoinGroup(ProcessRound):
    """A trainer that is ready for the next round, and members of which it saw that they are gone."""

    lost: list[int] = field(_MEMBERS)


class JoinedGroup(Head):
    """The number of a trainer and the round that it is in; round 0 means not yet."""

    member: int = field(_MEMBER)
    round: int = field(NUMBER)
    members: list[int] = field(_MEMBERS)
    run: str = field(Text(100, 0))


class RoundState(Head):
    """What has happened to a round."""

    regroup: bool = field(Boolean())
    broken: bool = field(Boolean())
    gone: list[int] = field(_MEMBERS)
    waiting: list[int] = field(_MEMBERS)


ENTER_GROUP = Call("enter_group", Struct(GroupProcess), answer=Struct(EnteredGroup))
JOIN_GROUP = Call("join_group", Struct(JoinGroup), answer=Struct(JoinedGroup))
WATCH_GROUP = Call("watch_group", Struct(ProcessRound), answer=Struct(RoundState))
SETTLE_GROUP = Call("settle_group", Struct(ProcessRound))
LEAVE_GROUP = Call("leave_group", Struct(GroupProcess))
GROUP_CALLS = table_of(ENTER_GROUP, JOIN_GROUP, WATCH_GROUP, SETTLE_GROUP, LEAVE_GROUP)
