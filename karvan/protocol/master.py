"""Calls of the master: leased work, the rendezvous of ranks, the job and the group of trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from karvan.errors import RefusedError
from karvan.protocol.values import (
    Count,
    Generation,
    GenerationNumber,
    Index,
    ProcessNumber,
    RoleName,
    Seconds,
)
from karvan.wire.message import Array
from karvan.wire.schema import (
    ArrayKind,
    Call,
    Fields,
    Head,
    Integer,
    Length,
    ListOf,
    Nullable,
    OneOf,
    Text,
    TupleOf,
    table_of,
)

# The calls about leased work; `karvan/work/service.py` has the protocol.

MOST_LEASES = 1024  # in one call
MOST_ERROR = 10_000  # characters

Positive = Annotated[int, Integer(1)]
PartPath = Annotated[str, Text(4096, 0)]
Parts = Sequence[tuple[PartPath, int]]  # with their numbers of records
Seed = Annotated[int, Integer(-(2**53))] | None
_Tokens = Annotated[list[Positive], Length(MOST_LEASES)]
_Kind = Annotated[str, OneOf("train", "evaluate", "predict", "export")]
_Failure = Annotated[str, Text(MOST_ERROR + 10_000)]
_State = Annotated[str, Text(1 << 24)]  # JSON of `Ledger.state_dict`
_COUNT = Integer(0, 2**52)  # the work that follows is counted on from there, up to 2**53

_TASK = Fields(
    {
        "kind": _Kind,
        **dict.fromkeys(("epoch", "number"), int),
        "path": PartPath,
        **dict.fromkeys(("first", "records", "done", "tries"), int),
        "skipped": list[int],
    }
)
Task = Annotated[dict[str, Any], _TASK]

# As `Ledger.state_dict`.
POSITION = Fields(
    {
        "spec": dict[str, Any],
        "position": Fields(
            {
                **dict.fromkeys(("epoch", "issued", "token", "records", "bad_records"), _COUNT),
                "exported": Integer(0, 1),
                "failure": Nullable(_Failure),
                **dict.fromkeys(("evaluation", "prediction"), int),  # as trainers have said; not restored
            }
        ),
        "tasks": ListOf(TupleOf(_Kind, int, int, PartPath, int, int, int, int, Text(1 << 20, 0))),
    }
)

# As `karvan.work.task.WorkSpec`.
_SPEC = Fields(
    {
        "parts": Parts,
        "records_per_task": Positive,
        "seed": Seed,
        "epochs": Nullable(Integer(-1)),
        "most_tries": Positive,
        "skip_bad_records": int,
        "export": bool,
    }
)


class OpenWork(Head):
    """The work, and whether what is left of other work is dropped for it."""

    spec: Annotated[dict[str, Any], _SPEC]
    drops_rest: bool = False


class Holder(Head):
    """The name of a trainer or loader that holds leases."""

    holder: str


class LeaseTasks(Holder):
    """Which tasks a holder asks for, and the last lease that it knows."""

    last_token: int
    kinds: Annotated[list[_Kind], Length(4, 1)]
    most: Annotated[int, Integer(1, MOST_LEASES)]
    epoch: Annotated[int | None, Nullable(int)] = None


class LeaseHead(Head):
    """A leased task."""

    token: Positive
    task: Task


class LeaseAnswer(Head):
    """The leases, or why there are none."""

    leases: Annotated[list[LeaseHead], Length(MOST_LEASES)]
    answer: Annotated[str, OneOf("tasks", "wait", "done", "failed")]
    failure: _Failure = ""


class DoneRecords(Holder):
    """How many records of leases are done: (token, records) of each."""

    done: Annotated[list[tuple[Positive, int]], Length(MOST_LEASES)]


class EndedLeases(Head):
    """The tokens of leases that have ended."""

    ended: _Tokens


class ReturnedLeases(Holder):
    """The tokens of leases that their holder will not finish."""

    tokens: _Tokens


class FailedLease(Holder):
    """A lease of which the records raise an error, with the bad record if it was found."""

    token: Positive
    error: Annotated[str, Text(MOST_ERROR, 0)]
    record: int | None
    number_in_file: int | None


class FailureAnswer(Head):
    """What follows from a failed task, as `karvan.work.ledger.TaskFailure`."""

    tries: int
    skipped: bool
    bad_records: int
    failure: _Failure | None


class BeginEvaluation(Holder):
    """An evaluation by its number, and its data."""

    evaluation: Positive
    parts: Parts
    records_per_task: Positive


class BeginPrediction(Holder):
    """A prediction by its number, and its data."""

    prediction: Positive
    parts: Parts
    records_per_task: Positive


class Begun(Head):
    """Whether the prediction has begun."""

    begun: bool


class Token(Head):
    """The token of a lease."""

    token: Positive


class SavedPosition(Head):
    """The position of the ledger, for a checkpoint."""

    state: _State


class RestorePosition(Holder):
    """The position of a checkpoint; null for the beginning."""

    state: _State | None


OPEN_WORK = Call("open_work", OpenWork)
LEASE_TASKS = Call("lease_tasks", LeaseTasks, answer=LeaseAnswer)
ACKNOWLEDGE_RECORDS = Call("acknowledge_records", DoneRecords, answer=EndedLeases)
GIVE_BACK_TASKS = Call("give_back_tasks", ReturnedLeases)
FAIL_TASK = Call("fail_task", FailedLease, answer=FailureAnswer)
BEGIN_EVALUATION = Call("begin_evaluation", BeginEvaluation)
BEGIN_PREDICTION = Call("begin_prediction", BeginPrediction, answer=Begun)
BEGIN_EXPORT = Call("begin_export", Holder, answer=Token)
TAKE_POSITION = Call("take_position", Holder, answer=SavedPosition)
RESTORE_POSITION = Call("restore_position", RestorePosition)
WORK_CALLS = table_of(
    *(OPEN_WORK, LEASE_TASKS, ACKNOWLEDGE_RECORDS, GIVE_BACK_TASKS, FAIL_TASK),
    *(BEGIN_EVALUATION, BEGIN_PREDICTION, BEGIN_EXPORT, TAKE_POSITION, RESTORE_POSITION),
)


# The calls for the rendezvous of a job's trainers: a key-value store at the registry.
#
# Values are one array of bytes, split by `sizes` of the head. No call waits for a key. Calls that may not be
# executed twice name their `request`, by which a registry that was restarted knows them again.


MOST_KEYS = 1 << 16
LONGEST_KEY = 1024
_Key = Annotated[str, Text(LONGEST_KEY)]
_Int64 = Annotated[int, Integer(-(2**63), 2**63 - 1)]
_Size = Annotated[int, Integer(0, 2**30)]
_OneSize = Annotated[list[_Size], Length(1, 1)]
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

    keys: Annotated[list[_Key], Length(MOST_KEYS)]


class SetKeys(Keys):
    """Several keys and the sizes of their values."""

    sizes: list[_Size]


class Presence(Head):
    """Whether all of the keys exist."""

    present: bool


class PresentValues(Presence):
    """The sizes of the values of all keys, if all of them exist."""

    sizes: list[_Size]


class ChangeKey(Generation):
    """A key of a generation's store that one request changes."""

    key: _Key
    request: Annotated[str, Text(40, 0)] = ""


class AddToKey(ChangeKey):
    """A key and the number that is added to it."""

    amount: _Int64


class Total(Head):
    """The sum that a key has."""

    total: _Int64


class AppendToKey(ChangeKey):
    """A key and the size of the value that is appended to it."""

    sizes: _OneSize


class CompareSetKey(ChangeKey):
    """A key and the sizes of the expected value and of the desired one."""

    sizes: Annotated[list[_Size], Length(2, 2)]


class OneValue(Head):
    """The size of a value."""

    sizes: _OneSize


class Deleted(Head):
    """Whether there was such a key."""

    deleted: bool


class KeyCount(Head):
    """The number of keys."""

    keys: Annotated[int, Integer(0, MOST_KEYS)]


def _check_one_value_per_key(head: SetKeys, arrays: Sequence[Array]) -> None:
    if len(head.keys) != len(head.sizes):
        raise RefusedError(f"expected {len(head.keys)} sizes of values, got {len(head.sizes)}.")


STORE_SET = Call("store_set", SetKeys, [_VALUES], rule=_check_one_value_per_key)
# All of the keys, or none of them.
STORE_GET = Call("store_get", Keys, answer=PresentValues, answers=[_VALUES])
STORE_CHECK = Call("store_check", Keys, answer=Presence)
STORE_ADD = Call("store_add", AddToKey, answer=Total)
STORE_APPEND = Call("store_append", AppendToKey, [_VALUES])
# The answer is the value afterwards.
STORE_COMPARE_SET = Call("store_compare_set", CompareSetKey, [_VALUES], answer=OneValue, answers=[_VALUES])
STORE_DELETE = Call("store_delete", ChangeKey, answer=Deleted)
STORE_COUNT = Call("store_count", Generation, answer=KeyCount)
RENDEZVOUS_CALLS = table_of(
    *(STORE_SET, STORE_GET, STORE_CHECK, STORE_ADD),
    *(STORE_APPEND, STORE_COMPARE_SET, STORE_DELETE, STORE_COUNT),
)


# The calls of commands about a running job; `karvan/launch/job_calls.py` has the protocol.


STATES = ("starting", "running", "stopping")
PROCESS_STATES = ("starting", "running", "silent", "restarting", "done", "ended", "not wanted")

_PROCESS = Fields(
    {
        "role": RoleName,
        "index": Index,
        "pid": Nullable(ProcessNumber),
        "host": Text(300, 0),
        "state": OneOf(*PROCESS_STATES),
        "code": Nullable(Integer(-(2**31))),
        "generation": GenerationNumber,
        "heartbeat": Nullable(Seconds),
        "activity": Text(300, 0),
    }
)
_WORK = Fields(
    {
        "epoch": int,
        "epochs": Nullable(Integer(-1)),
        **dict.fromkeys(("tasks", "done", "leased", "waiting"), int),
        **dict.fromkeys(("records", "bad_records", "to_predict"), int),
        "export": OneOf("none", "open", "done"),
        "failure": Nullable(Text(20_000, 0)),
    }
)


class JobStatus(Head):
    """The state of a job, of its processes and of its leased work."""

    job: Annotated[str, Text(300)]
    state: Annotated[str, OneOf(*STATES)]
    mode: Annotated[str, Text(20)]
    generation: GenerationNumber
    master: ProcessNumber
    processes: list[Annotated[dict[str, Any], _PROCESS]]
    work: Annotated[dict[str, Any], _WORK] | None


class ScaleJob(Head):
    """The number of trainers that a job shall have."""

    trainers: Count


class StopJob(Head):
    """Whether all processes are killed at once."""

    now: bool


JOB_STATUS = Call("job_status", answer=JobStatus)
SCALE_JOB = Call("scale_job", ScaleJob)
STOP_JOB = Call("stop_job", StopJob)
JOB_CALLS = table_of(JOB_STATUS, SCALE_JOB, STOP_JOB)


# The calls about the group of trainers; `karvan/work/trainer_group.py` has the protocol.


MOST_TRAINERS = 4096

_Member = Annotated[int, Integer(0, 2**31)]
_Members = Annotated[list[_Member], Length(MOST_TRAINERS)]


class GroupProcess(Head):
    """The name of a trainer's process."""

    process: str


class EnteredGroup(Head):
    """The number of a trainer, and the names of its group and run."""

    member: _Member
    group: Annotated[str, Text(100)]
    run: Annotated[str, Text(100)]


class ProcessRound(GroupProcess):
    """A trainer's process, and the round that it is in."""

    round: int


class JoinGroup(ProcessRound):
    """A trainer that is ready for the next round, and members of which it saw that they are gone."""

    lost: _Members


class JoinedGroup(Head):
    """The number of a trainer and the round that it is in; round 0 means not yet."""

    member: _Member
    round: int
    members: _Members
    run: Annotated[str, Text(100, 0)]


class RoundState(Head):
    """What has happened to a round."""

    regroup: bool
    broken: bool
    gone: _Members
    waiting: _Members


ENTER_GROUP = Call("enter_group", GroupProcess, answer=EnteredGroup)
JOIN_GROUP = Call("join_group", JoinGroup, answer=JoinedGroup)
WATCH_GROUP = Call("watch_group", ProcessRound, answer=RoundState)
SETTLE_GROUP = Call("settle_group", ProcessRound)
LEAVE_GROUP = Call("leave_group", GroupProcess)
GROUP_CALLS = table_of(ENTER_GROUP, JOIN_GROUP, WATCH_GROUP, SETTLE_GROUP, LEAVE_GROUP)
