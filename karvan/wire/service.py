"""`Service`: the base of all services that answer calls.

A service says which calls it takes (`karvan.wire.schema.calls`) and which of its methods does each.
`Service.answer` looks a call up, checks its head and arrays by the declaration, and only then calls the
method: whatever is unknown, missing, of another type, dtype, shape or size is refused with what was expected
and received, and changes nothing. A hello is checked in the same way, before `welcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

from karvan.wire.errors import RefusedError
from karvan.wire.message import Array, Message
from karvan.wire.schema.calls import Call, CallTable
from karvan.wire.schema.kinds import Fields, Kind, shown


class Caller(NamedTuple):
    """Who calls: the name of the session, and what it said when it came, checked."""

    session: str
    hello: Mapping[str, Any]
    address: str


class Request(NamedTuple):
    """A call that is as its declaration says, for the method that does it."""

    head: dict[str, Any]
    arrays: Sequence[Array]
    caller: Caller


Method: TypeAlias = Callable[[Request], Message]


class Endpoint(NamedTuple):
    """A declared call and the method that does it."""

    call: Call
    method: Method


def endpoints(calls: CallTable, methods: Mapping[str, Method]) -> dict[str, Endpoint]:
    """A method for each declared call; one too many or too few is a mistake of the program."""
    if set(calls) != set(methods):
        odd = ", ".join(sorted(set(calls) ^ set(methods)))
        raise ValueError(f"Expected one method for each declared call, got another set: {odd}.")
    return {name: Endpoint(call, methods[name]) for name, call in calls.items()}


class Service:
    """What a server answers with; its methods run on the threads of callers.

    hello: what callers say when they come. endpoints: set by the service; see `endpoints`. progresses:
    whether a call that was answered is progress (`karvan.activity`); some are answered with "wait".
    """

    name = "service"
    hello: ClassVar[Kind] = Fields({})
    endpoints: Mapping[str, Endpoint] = {}
    progresses = True

    def welcome(self, caller: Caller) -> dict[str, Any]:
        """Somebody connects, for the first time or again; returns what it should know. May refuse."""
        return {}

    def admit(self, caller: Caller) -> None:
        """Before each call: refuse callers that may not call any more, as those of an older run."""

    @final
    def answer(self, call: Message, caller: Caller) -> Message:
        """Do a call: `call.head["method"]` says what; "ping" is answered for all services."""
        method = call.head.get("method")
        known = self.endpoints.get(method) if isinstance(method, str) else None
        if known is None:
            names = ", ".join(sorted(self.endpoints)) or "none"
            raise RefusedError(
                f"{self.name} does not know the call {shown(method)}; expected one of {names}."
            )
        self.admit(caller)
        return known.method(Request(known.call.check(call), call.arrays, caller))

    def close(self) -> None:
        """It is not needed any more; called by who runs it, after the server's end."""
