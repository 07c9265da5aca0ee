"""Declarations of calls: the head and arrays of a call and of its answer.

    keys = ArrayKind("keys", "int64", "n")
    CALLS = table_of(Call("erase", Fields({"table": Text()}), [keys], answer=Fields({"rows": Integer()})))

A service has one table of such declarations (`karvan.wire.service`) and checks every call by it before any
code of its own runs. The same table goes to the peers that call the service, which check answers by it: a
peer that lies, or is of another version, cannot make its caller read beyond an array either.

Sizes of arrays are numbers, or names, which must stand for the same size everywhere within one message, or
functions of the head. What depends on the state of a service, such as the dim of a table, is checked right
behind the border, with `expect_array`.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from karvan.wire.errors import RefusedError
from karvan.wire.message import Array, Message
from karvan.wire.schema.kinds import Fields, Kind

Head: TypeAlias = Mapping[str, Any]
Size: TypeAlias = int | str | Callable[[Head], int]

ANY = "*"  # a size that may be anything
_NOTHING = Fields({})

# What the wire itself puts into the head of a call, of an answer, and of a hello.
_OF_CALLS = frozenset({"method", "number", "received", "within", "arrays"})
_OF_ANSWERS = frozenset({"number", "arrays"})
_OF_HELLOS = frozenset({"method", "session", "connection", "patience", "deadline", "arrays"})


class ArrayKind:
    """An array of a message: its name, for people, its dtype and its shape.

    dtype: one, or several that are allowed, or a function of the head that gives it.
    """

    def __init__(self, name: str, dtype: str | tuple[str, ...] | Callable[[Head], str], *shape: Size) -> None:
        self.name = name
        self._dtype = dtype
        self._shape = shape

    def check(self, array: Array, head: Head, sizes: dict[str, int], where: str) -> None:
        """A RefusedError unless the array is as declared; sizes with names are noted in `sizes`."""
        dtypes = self._dtype(head) if callable(self._dtype) else self._dtype
        fits = len(array.shape) == len(self._shape)
        expected: list[int | str] = []
        for place, size in enumerate(self._shape):
            wanted: int | str = size(head) if callable(size) else size
            if isinstance(wanted, str) and wanted != ANY:
                wanted = sizes.setdefault(wanted, array.shape[place]) if fits else sizes.get(wanted, wanted)
            expected.append(wanted)
            fits = fits and (wanted == ANY or wanted == array.shape[place])
        allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
        if not fits or array.dtype.name not in allowed:
            raise RefusedError(
                f"expected {where} to be {' or '.join(allowed)} [{', '.join(map(str, expected))}], "
                f"got {array.dtype.name} {list(array.shape)}."
            )


@dataclass(frozen=True)
class ForEach:
    """Arrays that come again for each of something that the head has; names of sizes hold for one round."""

    count: Callable[[Head], int]
    arrays: Sequence[ArrayKind]


@dataclass(frozen=True)
class DescribedArrays:
    """Arrays that the head describes, as those of a batch; the call's `rule` checks them."""

    most: int = 1024


@dataclass(frozen=True)
class OptionalArrays:
    """Arrays that come all together, or not at all, as the head says."""

    given: Callable[[Head], bool]
    arrays: Sequence[ArrayKind]


Declared: TypeAlias = ArrayKind | ForEach | DescribedArrays | OptionalArrays


@dataclass(frozen=True)
class Call:
    """The declaration of a call.

    rule: what several parts of a call must fulfil together; called with the checked head and the arrays.
    answer: the head of the answer; answers: its arrays, whose functions see the answer's head first and the
    call's head behind it; answer_rule: as `rule`, for the answer.
    """

    name: str
    head: Kind = _NOTHING
    arrays: Sequence[Declared] = ()
    answer: Kind = _NOTHING
    answers: Sequence[Declared] = ()
    rule: Callable[[Head, Sequence[Array]], None] | None = None
    answer_rule: Callable[[Head, Sequence[Array]], None] | None = None

    def check(self, call: Message) -> dict[str, Any]:
        """The head of a call, checked, without what is the wire's own; a RefusedError says what is wrong."""
        try:
            head: dict[str, Any] = self.head.check(_without(call.head, _OF_CALLS), "the head")
            _check_arrays(self.arrays, call.arrays, head)
            if self.rule is not None:
                self.rule(head, call.arrays)
        except RefusedError as error:
            raise RefusedError(f"{self.name}: {error}") from None
        return head

    def check_answer(self, asked: Head, answer: Message) -> Message:
        """The answer to a call with that head, checked; a RefusedError says what is wrong."""
        try:
            head: dict[str, Any] = self.answer.check(_without(answer.head, _OF_ANSWERS), "the answer")
            _check_arrays(self.answers, answer.arrays, ChainMap(head, dict(asked)))
            if self.answer_rule is not None:
                self.answer_rule(head, answer.arrays)
        except RefusedError as error:
            raise RefusedError(f"the answer to {self.name}: {error}") from None
        return Message(head, answer.arrays)


CallTable: TypeAlias = Mapping[str, Call]


def table_of(*calls: Call) -> dict[str, Call]:
    """Calls by their names."""
    made = {call.name: call for call in calls}
    if len(made) != len(calls):
        raise ValueError("Expected each call to be declared once.")
    return made


def said_by(hello: Head) -> dict[str, Any]:
    """What a caller's hello says besides what the wire itself has put there."""
    return _without(hello, _OF_HELLOS)


def expect_array(array: Array, what: str, dtype: str, *shape: int) -> Array:
    """The array, if it is of that dtype and shape, as only the state of a service can tell."""
    if array.dtype.name != dtype or array.shape != shape:
        raise RefusedError(
            f"expected {what} to be {dtype} {list(shape)}, got {array.dtype.name} {list(array.shape)}."
        )
    return array


def _without(head: Head, names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in head.items() if name not in names}


def _check_arrays(declared: Sequence[Declared], arrays: Sequence[Array], head: Head) -> None:
    if any(isinstance(each, DescribedArrays) for each in declared):
        (one,) = declared
        assert isinstance(one, DescribedArrays)
        if len(arrays) > one.most:
            raise RefusedError(f"expected up to {one.most} arrays, got {len(arrays)}.")
        return
    expected = list(_expanded(declared, head, len(arrays)))
    if len(expected) != len(arrays):
        names = ", ".join(where for _, _, where in expected[:8]) or "none"
        raise RefusedError(f"expected {len(expected)} arrays ({names}), got {len(arrays)}.")
    for (kind, sizes, where), array in zip(expected, arrays, strict=True):
        kind.check(array, head, sizes, where)


def _expanded(
    declared: Sequence[Declared], head: Head, given: int
) -> Iterator[tuple[ArrayKind, dict[str, int], str]]:
    """Each array that is expected, with the sizes known within its round, and its name."""
    common: dict[str, int] = {}
    for each in declared:
        if isinstance(each, ArrayKind):
            yield each, common, each.name
        elif isinstance(each, OptionalArrays):
            if each.given(head):
                yield from ((kind, common, kind.name) for kind in each.arrays)
        elif isinstance(each, ForEach):
            rounds = each.count(head)
            if rounds * len(each.arrays) > given:
                raise RefusedError(f"expected {rounds * len(each.arrays)} arrays, got {given}.")
            for number in range(rounds):
                sizes: dict[str, int] = {}
                yield from ((kind, sizes, f"{kind.name}[{number}]") for kind in each.arrays)
