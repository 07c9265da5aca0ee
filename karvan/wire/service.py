"""`Service`: the base of all services that answer calls.

A service declares which calls it accepts (`karvan.wire.schema.calls`) and which of its methods executes each.
`Service.answer` looks a call up, checks its head and arrays against the declaration, and only then calls the
method: anything unknown, missing, or of another type, dtype, shape or size is refused with what was expected
and received, and changes nothing. A hello is checked in the same way, before `welcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, final

from karvan.outages import is_exhausted
from karvan.wire.errors import RefusedError
from karvan.wire.message import Array, Message
from karvan.wire.schema.calls import Call, CallTable
from karvan.wire.schema.kinds import Fields, Kind, shown


class Caller(NamedTuple):
    """Who calls: the name of its session, and its checked hello."""

    session: str
    hello: Mapping[str, Any]


class Request(NamedTuple):
    """A call that matches its declaration, for the method that executes it."""

    head: dict[str, Any]
    arrays: Sequence[Array]
    caller: Caller


Method: TypeAlias = Callable[[Request], Message]


class Endpoint(NamedTuple):
    """A declared call and the method that executes it."""

    call: Call
    method: Method


def endpoints(calls: CallTable, methods: Mapping[str, Method]) -> dict[str, Endpoint]:
    """A method for each declared call; one too many or too few is a ValueError."""
    if set(calls) != set(methods):
        odd = ", ".join(sorted(set(calls) ^ set(methods)))
        raise ValueError(f"Expected one method for each declared call, got another set: {odd}.")
    return {name: Endpoint(call, methods[name]) for name, call in calls.items()}


class Service:
    """Answers the calls of a server; its methods run on one thread per caller.

    hello: the fields of a caller's hello. endpoints: set by the service; see `endpoints`. progresses:
    whether an answered call counts as progress (`karvan.activity`); some services may answer "wait".
    on_exhaustion: called with an error that says that this process has no memory or disk to go on; a process
    that is there for its service ends then, before a caller could take the error for its own.
    """

    name = "service"
    hello: ClassVar[Kind] = Fields({})
    endpoints: Mapping[str, Endpoint] = {}
    progresses = True
    on_exhaustion: Callable[[BaseException], object] | None = None

    def note_failure(self, error: BaseException) -> None:
        """Something failed in the service, in a call or behind it."""
        if self.on_exhaustion is not None and is_exhausted(error):
            self.on_exhaustion(error)

    def welcome(self, caller: Caller) -> dict[str, Any]:
        """A caller connects, for the first time or again; returns what it should know. May refuse."""
        return {}

    def admit(self, caller: Caller) -> None:
        """Before each call: refuse callers that may not call any more, such as those of an older run."""

    @final
    def answer(self, call: Message, caller: Caller) -> Message:
        """Execute the call that `call.head["method"]` names; the server answers "ping" for all services."""
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
        """Release resources; called by the owner of the service, after the server has ended."""
