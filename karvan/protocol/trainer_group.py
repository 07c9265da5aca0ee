"""The calls about the group of trainers; `karvan/work/trainer_group.py` has the protocol."""

from __future__ import annotations

from karvan.protocol.values import NUMBER
from karvan.wire.schema.calls import Call, table_of
from karvan.wire.schema.kinds import Boolean, Fields, Integer, ListOf, Text

MOST_TRAINERS = 4096

_PROCESS = Text(200)
_MEMBER = Integer(0, 2**31)
_MEMBERS = ListOf(_MEMBER, MOST_TRAINERS)

GROUP_CALLS = table_of(
    Call(
        "enter_group",
        Fields({"process": _PROCESS}),
        answer=Fields({"member": _MEMBER, "group": Text(100), "run": Text(100)}),
    ),
    Call(
        "join_group",
        Fields({"process": _PROCESS, "round": NUMBER, "lost": _MEMBERS}),
        answer=Fields({"member": _MEMBER, "round": NUMBER, "members": _MEMBERS, "run": Text(100, 0)}),
    ),
    Call(
        "watch_group",
        Fields({"process": _PROCESS, "round": NUMBER}),
        answer=Fields({"regroup": Boolean(), "broken": Boolean(), "gone": _MEMBERS, "waiting": _MEMBERS}),
    ),
    Call("settle_group", Fields({"process": _PROCESS, "round": NUMBER})),
    Call("leave_group", Fields({"process": _PROCESS})),
)
