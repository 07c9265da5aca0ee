"""The calls of a job's registry, made by members and by clients that look for them."""

from __future__ import annotations

from karvan.activity import MOST_WAITS
from karvan.job.roles import all_roles
from karvan.wire.schema.calls import Call, table_of
from karvan.wire.schema.kinds import Boolean, Fields, Float, Integer, ListOf, MapOf, OneOf, Text

ROLE = OneOf(*all_roles())
INDEX = Integer(0, 2**20)
GENERATION = Integer(0, 2**31)
_ADDRESS = Text(300)
_PID = Integer(0, 2**31)

# A member sends all of it with each of its calls; `process` is a random name.
_WHO = {
    "role": ROLE,
    "index": INDEX,
    "address": _ADDRESS,
    "generation": GENERATION,
    "pid": _PID,
    "process": Text(64),
}
# How many processes the role has, if the member knows; see `Directory.count`.
_COUNT = {"count": INDEX}
_MEMBER = Fields(_WHO, optional=_COUNT)
# See `karvan.activity.ActivityReport`.
_ACTIVITY = Fields(
    {
        "progress": Integer(),
        "idle": Float(0.0),
        "task": Text(100, 0),
        "waits": MapOf(Float(0.0), MOST_WAITS, Text(100)),
        "dumps": Boolean(),
    }
)
_BEAT = Fields({**_WHO, "activity": _ACTIVITY}, optional=_COUNT)
_LISTED = Fields(
    {
        "role": ROLE,
        "index": INDEX,
        "address": _ADDRESS,
        "generation": GENERATION,
        "pid": _PID,
        "healthy": Boolean(),
        "silent": Float(0.0),
        **_COUNT,
    }
)

REGISTRY_CALLS = table_of(
    Call("register", _MEMBER),
    Call("beat", _BEAT, answer=Fields({"known": Boolean(), "replaced": Boolean()})),
    Call("leave", _MEMBER),
    Call("generation", answer=Fields({"generation": GENERATION})),
    Call("members", answer=Fields({"members": ListOf(_LISTED)})),
)
