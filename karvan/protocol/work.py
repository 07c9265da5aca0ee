"""The calls about leased work; `karvan/work/service.py` has the protocol."""

from __future__ import annotations

from karvan.protocol.values import NUMBER
from karvan.wire.schema import (
    Boolean,
    Call,
    Fields,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Plain,
    Text,
    TupleOf,
    table_of,
)

MOST_LEASES = 1024  # in one call
MOST_ERROR = 10_000  # characters

_HOLDER = Text(200)
PART_PATH = Text(4096, 0)
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
_LEASE = Fields({"token": _TOKEN, "task": TASK})

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
        "parts": ListOf(TupleOf(PART_PATH, NUMBER)),
        "records_per_task": Integer(1),
        "seed": SEED,
        "epochs": Nullable(Integer(-1)),
        "most_tries": Integer(1),
        "skip_bad_records": NUMBER,
        "export": Boolean(),
    }
)

WORK_CALLS = table_of(
    Call("open_work", Fields({"spec": _SPEC}, {"drops_rest": Boolean()})),
    Call(
        "lease_tasks",
        Fields(
            {
                "holder": _HOLDER,
                "last_token": NUMBER,
                "kinds": ListOf(_KIND, 4, 1),
                "most": Integer(1, MOST_LEASES),
            },
            {"epoch": Nullable(NUMBER)},
        ),
        answer=Fields(
            {"leases": ListOf(_LEASE, MOST_LEASES), "answer": OneOf("tasks", "wait", "done", "failed")},
            {"failure": _FAILURE},
        ),
    ),
    Call(
        "acknowledge_records",
        Fields({"holder": _HOLDER, "done": ListOf(TupleOf(_TOKEN, NUMBER), MOST_LEASES)}),
        answer=Fields({"ended": _TOKENS}),
    ),
    Call("give_back_tasks", Fields({"holder": _HOLDER, "tokens": _TOKENS})),
    Call(
        "fail_task",
        Fields(
            {
                "holder": _HOLDER,
                "token": _TOKEN,
                "error": Text(MOST_ERROR, 0),
                "record": Nullable(NUMBER),
                "number_in_file": Nullable(NUMBER),
            }
        ),
        answer=Fields(
            {
                "tries": NUMBER,
                "skipped": Boolean(),
                "bad_records": NUMBER,
                "failure": Nullable(_FAILURE),
            }
        ),
    ),
    Call(
        "begin_evaluation",
        Fields(
            {
                "holder": _HOLDER,
                "evaluation": Integer(1),
                "parts": ListOf(TupleOf(PART_PATH, NUMBER)),
                "records_per_task": Integer(1),
            }
        ),
    ),
    Call(
        "begin_prediction",
        Fields(
            {
                "holder": _HOLDER,
                "prediction": Integer(1),
                "parts": ListOf(TupleOf(PART_PATH, NUMBER)),
                "records_per_task": Integer(1),
            }
        ),
        answer=Fields({"begun": Boolean()}),
    ),
    Call("begin_export", Fields({"holder": _HOLDER}), answer=Fields({"token": _TOKEN})),
    Call("take_position", Fields({"holder": _HOLDER}), answer=Fields({"state": _STATE})),
    Call("restore_position", Fields({"holder": _HOLDER, "state": Nullable(_STATE)})),
)
