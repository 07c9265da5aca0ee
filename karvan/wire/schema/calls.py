"""Declarations of calls: the head and arrays of a call and of its answer.

    keys = ArrayKind("keys", "int64", "n")
    CALLS = table_of(Call("erase", Fields({"table": Text()}), [keys], answer=Fields({"rows": Integer()})))

A service has one table of such declarations (`karvan.wire.service`) and checks every call against it before
any code of its own runs. The clients of the service check answers against the same table: a malicious
service, or one of another version, cannot make its caller read beyond an array either.

Sizes of arrays are numbers, or names, which mean the same size everywhere within one message, or functions
of the head. What depends on the state of a service, such as the dim of a table, is checked first thing in the
service, with `expect_array`.
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

ANY = "*"  # any size
_NOTHING = Fields({})

# The fields that the wire itself adds to the head of a call, of an answer, and of a hello.
_OF_CALLS = frozenset({"method", "number", "received", "within", "arrays"})
_OF_ANSWERS = frozenset({"number", "arrays"})
_OF_HELLOS = frozenset({"method", "session", "connection", "patience", "deadline", "arrays"})


class ArrayKind:
    """An array of a message: its name for error messages, its dtype and its shape.

    dtype: one, or several that are allowed, or a function of the head that returns it.
    """

    def __init__(self, name: str, dtype: str | tuple[str, ...] | Callable[[Head], str], *shape: Size) -> None:
        self.name = name
        self._dtype = dtype
        self._shape = shape

    def check(self, array: Array, head: Head, sizes: dict[str, int], where: str) -> None:
        """A RefusedError unless the array is as declared; named sizes are added to `sizes`."""
        dtypes = self._dtype(head) if callable(self._dtype) else self._dtype
        fits = len(array.shape) == len(self._shape)
        expected: list[int | str] = []
        for axis, declared in enumerate(self._shape):
            size: int | str = declared(head) if callable(declared) else declared
            if isinstance(size, str) and size != ANY:
                size = sizes.setdefault(size, array.shape[axis]) if fits else sizes.get(size, size)
            expected.append(size)
            fits = fits and (size == ANY or size == array.shape[axis])
        allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
        if not fits or array.dtype.name not in allowed:
            raise RefusedError(
                f"expected {where} to be {' or '.join(allowed)} [{', '.join(map(str, expected))}], "
                f"got {array.dtype.name} {list(array.shape)}."
            )


@dataclass(frozen=True)
class ForEach:
    """Arrays that are repeated as often as the head says; named sizes are valid within one repetition."""

    count: Callable[[Head], int]
    arrays: Sequence[ArrayKind]


@dataclass(frozen=True)
class DescribedArrays:
    """Arrays that the head describes, such as those of a batch; the call's `rule` checks them."""

    most: int = 1024


@dataclass(frozen=True)
class OptionalArrays:
    """Arrays that are all present, or all absent, as the head says."""

    present: Callable[[Head], bool]
    arrays: Sequence[ArrayKind]


Declared: TypeAlias = ArrayKind | ForEach | DescribedArrays | OptionalArrays


@dataclass(frozen=True)
class Call:
    """The declaration of a call.

    rule: a check across several parts of a call; called with the checked head and the arrays.
    answer: the head of the answer; answers: its arrays, whose functions look fields up in the answer's head
    first and then in the call's head; answer_rule: as `rule`, for the answer.
    """

    name: str
    head: Kind = _NOTHING
    arrays: Sequence[Declared] = ()
    answer: Kind = _NOTHING
    answers: Sequence[Declared] = ()
    rule: Callable[[Head, Sequence[Array]], None] | None = None
    answer_rule: Callable[[Head, Sequence[Array]], None] | None = None

    def check(self, call: Message) -> dict[str, Any]:
        """The checked head of a call without the wire's own fields; a RefusedError says what is wrong."""
        try:
            head: dict[str, Any] = self.head.check(_without(call.head, _OF_CALLS), "the head")
            _check_arrays(self.arrays, call.arrays, head)
            if self.rule is not None:
                self.rule(head, call.arrays)
        except RefusedError as error:
            raise RefusedError(f"{self.name}: {error}") from None
        return head

    def check_answer(self, call_head: Head, answer: Message) -> Message:
        """The checked answer to a call with that head; a RefusedError says what is wrong."""
        try:
            head: dict[str, Any] = self.answer.check(_without(answer.head, _OF_ANSWERS), "the answer")
            _check_arrays(self.answers, answer.arrays, ChainMap(head, dict(call_head)))
            if self.answer_rule is not None:
                self.answer_rule(head, answer.arrays)
        except RefusedError as error:
            raise RefusedError(f"the answer to {self.name}: {error}") from None
        return Message(head, answer.arrays)


CallTable: TypeAlias = Mapping[str, Call]


def table_of(*calls: Call) -> dict[str, Call]:
    """Calls by their names."""
    table = {call.name: call for call in calls}
    if len(table) != len(calls):
        raise ValueError("Expected each call to be declared once.")
    return table


def hello_fields(hello: Head) -> dict[str, Any]:
    """The fields of a caller's hello without those that the wire itself has added."""
    return _without(hello, _OF_HELLOS)


def expect_array(array: Array, what: str, dtype: str, *shape: int) -> Array:
    """The array; a RefusedError unless it has this dtype and shape, which depend on the service's state."""
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
    declared: Sequence[Declared], head: Head, received: int
) -> Iterator[tuple[ArrayKind, dict[str, int], str]]:
    """Each expected array, with the sizes known within its repetition, and its name."""
    common: dict[str, int] = {}
    for each in declared:
        if isinstance(each, ArrayKind):
            yield each, common, each.name
        elif isinstance(each, OptionalArrays):
            if each.present(head):
                yield from ((kind, common, kind.name) for kind in each.arrays)
        elif isinstance(each, ForEach):
            repetitions = each.count(head)
            if repetitions * len(each.arrays) > received:
                raise RefusedError(f"expected {repetitions * len(each.arrays)} arrays, got {received}.")
            for number in range(repetitions):
                sizes: dict[str, int] = {}
                yield from ((kind, sizes, f"{kind.name}[{number}]") for kind in each.arrays)
