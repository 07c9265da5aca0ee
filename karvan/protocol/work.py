"""The calls about leased work; `karvan/work/service.py` has the protocol."""

from __future__ import annotations

from typing import Any

from karvan.protocol.values import NUMBER
from karvan.wire.schema import (
    Boolean,
    Call,
    Fields,
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
