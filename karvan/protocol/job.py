"""The calls of commands about a running job; `karvan/launch/master/job_service.py` has the protocol."""

from __future__ import annotations

from karvan.protocol.registry import GENERATION, INDEX, ROLE
from karvan.protocol.values import NUMBER
from karvan.wire.schema.calls import Call, table_of
from karvan.wire.schema.kinds import Boolean, Fields, Float, Integer, ListOf, Nullable, OneOf, Text

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
