"""Calls of the master: leased work, the rendezvous of ranks, the job and the group of trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from karvan.protocol.values import GENERATION, INDEX, NUMBER, ROLE, Generation
from karvan.wire.message import Array, RefusedError
from karvan.wire.schema import (
    ArrayKind,
    Boolean,
    Call,
    Fields,
    Float,
    Head,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Plain,
    Struct,
    Text,
    TupleOf,
    field,
    optional,
    table_of,
)

# The calls about leased work; `karvan/work/service.py` has the protocol.

MOST_LEASES = 1024  # in one call
MOST_ERROR = 10_000  # characters

PART_PATH = Text(4096, 0)
_PARTS = ListOf(TupleOf(PART_PATH, NUMBER))
_TOKEN = Integer(1)
_TOKENS = ListOf(_TOKEN, MOST_LEASES)
_KIND = OneOf("train", "evaluate", "predict", "export")
TASK = Fields(
    {
        "kind": _KIND,
        "epoch": NUMBER,
        "number": NUMBER,
        "path": PART_PATH,
        "first": NUMBER,
        "records": NUMBER,
        "done": NUMBER,
        "tries": NUMBER,
        "skipped": ListOf(NUMBER),
    }
)
_FAILURE = Text(MOST_ERROR + 10_000)
SEED = Nullable(Integer(-(2**53)))
_STATE = Text(1 << 24)  # JSON of `Ledger.state_dict`

_COUNT = Integer(0, 2**52)  # the work that follows is counted on from there, up to 2**53

# As `Ledger.state_dict`.
POSITION = Fields(
    {
        "spec": MapOf(Plain()),
        "position": Fields(
            {
                "epoch": _COUNT,
                "issued": _COUNT,
                "token": _COUNT,
                "records": _COUNT,
                "bad_records": _COUNT,
                "exported": Integer(0, 1),
                "failure": Nullable(_FAILURE),
                "evaluation": NUMBER,  # as trainers have said; not restored
                "prediction": NUMBER,
            }
        ),
        "tasks": ListOf(
            TupleOf(_KIND, NUMBER, NUMBER, PART_PATH, NUMBER, NUMBER, NUMBER, NUMBER, Text(1 << 20, 0))
        ),
    }
)

# As `karvan.work.task.WorkSpec`.
_SPEC = Fields(
    {
        "parts": _PARTS,
        "records_per_task": Integer(1),
        "seed": SEED,
        "epochs": Nullable(Integer(-1)),
        "most_tries": Integer(1),
        "skip_bad_records": NUMBER,
        "export": Boolean(),
    }
)


class OpenWork(Head):
    """The work, and whether what is left of other work is dropped for it."""

    spec: dict[str, Any] = field(_SPEC)
    drops_rest: bool = optional(Boolean(), default=False)


class Holder(Head):
    """The name of a trainer or loader that holds leases."""

    holder: str = field(Text(200))


class LeaseTasks(Holder):
    """Which tasks a holder asks for, and the last lease that it knows."""

    last_token: int = field(NUMBER)
    kinds: list[str] = field(ListOf(_KIND, 4, 1))
    most: int = field(Integer(1, MOST_LEASES))
    epoch: int | None = optional(Nullable(NUMBER))


class LeaseHead(Head):
    """A leased task."""

    token: int = field(_TOKEN)
    task: dict[str, Any] = field(TASK)


class LeaseAnswer(Head):
    """The leases, or why there are none."""

    leases: list[LeaseHead] = field(ListOf(Struct(LeaseHead), MOST_LEASES))
    answer: str = field(OneOf("tasks", "wait", "done", "failed"))
    failure: str = optional(_FAILURE, default="")


class DoneRecords(Holder):
    """How many records of leases are done: (token, records) of each."""

    done: list[tuple[int, int]] = field(ListOf(TupleOf(_TOKEN, NUMBER), MOST_LEASES))


class EndedLeases(Head):
    """The tokens of leases that have ended."""

    ended: list[int] = field(_TOKENS)


class ReturnedLeases(Holder):
    """The tokens of leases that their holder will not finish."""

    tokens: list[int] = field(_TOKENS)


class FailedLease(Holder):
    """A lease of which the records raise an error, with the bad record if it was found."""

    token: int = field(_TOKEN)
    error: str = field(Text(MOST_ERROR, 0))
    record: int | None = field(Nullable(NUMBER))
    number_in_file: int | None = field(Nullable(NUMBER))


class FailureAnswer(Head):
    """What follows from a failed task, as `karvan.work.ledger.TaskFailure`."""

    tries: int = field(NUMBER)
    skipped: bool = field(Boolean())
    bad_records: int = field(NUMBER)
    failure: str | None = field(Nullable(_FAILURE))


class BeginEvaluation(Holder):
    """An evaluation by its number, and its data."""

    evaluation: int = field(Integer(1))
    parts: list[tuple[str, int]] = field(_PARTS)
    records_per_task: int = field(Integer(1))


class BeginPrediction(Holder):
    """A prediction by its number, and its data."""

    prediction: int = field(Integer(1))
    parts: list[tuple[str, int]] = field(_PARTS)
    records_per_task: int = field(Integer(1))


class Begun(Head):
    """Whether the prediction has begun."""

    begun: bool = field(Boolean())


class Token(Head):
    """The token of a lease."""

    token: int = field(_TOKEN)


class SavedPosition(Head):
    """The position of the ledger, for a checkpoint."""

    state: str = field(_STATE)


class RestorePosition(Holder):
    """The position of a checkpoint; null for the beginning."""

    state: str | None = field(Nullable(_STATE))


OPEN_WORK = Call("open_work", Struct(OpenWork))
LEASE_TASKS = Call("lease_tasks", Struct(LeaseTasks), answer=Struct(LeaseAnswer))
ACKNOWLEDGE_RECORDS = Call("acknowledge_records", Struct(DoneRecords), answer=Struct(EndedLeases))
GIVE_BACK_TASKS = Call("give_back_tasks", Struct(ReturnedLeases))
FAIL_TASK = Call("fail_task", Struct(FailedLease), answer=Struct(FailureAnswer))
BEGIN_EVALUATION = Call("begin_evaluation", Struct(BeginEvaluation))
BEGIN_PREDICTION = Call("begin_prediction", Struct(BeginPrediction), answer=Struct(Begun))
BEGIN_EXPORT = Call("begin_export", Struct(Holder), answer=Struct(Token))
TAKE_POSITION = Call("take_position", Struct(Holder), answer=Struct(SavedPosition))
RESTORE_POSITION = Call("restore_position", Struct(RestorePosition))
WORK_CALLS = table_of(
    OPEN_WORK,
    LEASE_TASKS,
    ACKNOWLEDGE_RECORDS,
    GIVE_BACK_TASKS,
    FAIL_TASK,
    BEGIN_EVALUATION,
    BEGIN_PREDICTION,
    BEGIN_EXPORT,
    TAKE_POSITION,
    RESTORE_POSITION,
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
