"""The schema of calls: kinds of values with bounds, and calls made of them."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeAlias, cast

from typing_extensions import TypeVar, dataclass_transform, override

from karvan.wire.message import Array, Message, RefusedError

# Kinds of values in the head of a message, declared once and checked on arrival.
#
# A kind checks a value from JSON and returns it as the service uses it, or raises a RefusedError that says
# where in the message something else was expected:
#
#     counts = ListOf(Integer(0, 2**32), longest=1024)
#     counts.check([3, 4], "counts")         # [3, 4]
#     counts.check([3, -1], "counts")        # RefusedError: expected counts[1] to be a whole number from 0 …
#
# A value that passes has the declared type, range and size; nothing is converted silently except whole
# numbers to floats. True and "1" are not numbers, and NaN is not a float unless a kind allows it.


FLOAT32_MAX = 3.4028234663852886e38
_LARGEST = sys.float_info.max
_SHOWN = 80  # characters of a value in a message
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)
D = TypeVar("D")


class Kind(ABC, Generic[T_co]):
    """A set of values."""

    @abstractmethod
    def check(self, value: Any, where: str) -> T_co:
        """The value, ready for use; otherwise a RefusedError that names `where` in the message it is."""

    @abstractmethod
    def __str__(self) -> str:
        """For error messages: "a whole number from 0 to 3"."""

    def refuse(self, value: Any, where: str) -> NoReturn:
        """Say what was expected and what was received."""
        raise RefusedError(f"expected {where} to be {self}, got {shown(value)}.")


class Integer(Kind[int]):
    """A whole number within bounds, both included."""

    def __init__(self, least: int = 0, most: int = 2**53) -> None:
        self._least = least
        self._most = most

    @override
    def check(self, value: Any, where: str) -> int:
        if type(value) is not int or not self._least <= value <= self._most:
            self.refuse(value, where)
        return value

    def __str__(self) -> str:
        return f"a whole number from {self._least} to {self._most}"


class Float(Kind[float]):
    """A number within bounds, both included; finite: neither infinite nor NaN."""

    def __init__(self, least: float = -math.inf, most: float = math.inf, *, finite: bool = True) -> None:
        self._least = least
        self._most = most
        self._finite = finite

    @override
    def check(self, value: Any, where: str) -> float:
        if type(value) is float and self._least <= value <= self._most and -_LARGEST <= value <= _LARGEST:
            return value  # the usual case is tested first
        if type(value) is int and -(2**1000) < value < 2**1000:
            value = float(value)
        if type(value) is not float:
            self.refuse(value, where)
        if math.isfinite(value):
            if not self._least <= value <= self._most:
                self.refuse(value, where)
        elif self._finite:
            self.refuse(value, where)
        return value

    def __str__(self) -> str:
        finite = "a finite number" if self._finite else "a number"
        if self._least == -math.inf and self._most == math.inf:
            return finite
        return f"{finite} from {self._least:g} to {self._most:g}"


class Boolean(Kind[bool]):
    """True or false."""

    @override
    def check(self, value: Any, where: str) -> bool:
        if type(value) is not bool:
            self.refuse(value, where)
        return value

    def __str__(self) -> str:
        return "true or false"


class Text(Kind[str]):
    """Text of a bounded number of characters."""

    def __init__(self, longest: int = 200, shortest: int = 1) -> None:
        self._longest = longest
        self._shortest = shortest

    @override
    def check(self, value: Any, where: str) -> str:
        if type(value) is not str or not self._shortest <= len(value) <= self._longest:
            self.refuse(value, where)
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON may contain lone surrogates, which cannot be encoded
            self.refuse(value, where)
        return value

    def __str__(self) -> str:
        return f"text of {self._shortest} to {self._longest} characters"


class OneOf(Kind[str]):
    """One of several texts."""

    def __init__(self, *choices: str) -> None:
        self._choices = choices

    @override
    def check(self, value: Any, where: str) -> str:
        if type(value) is not str or value not in self._choices:
            self.refuse(value, where)
        return value

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self._choices))}"


class Nullable(Kind[T_co | None]):
    """Null, or a value of another kind."""

    def __init__(self, kind: Kind[T_co]) -> None:
        self._kind = kind

    @override
    def check(self, value: Any, where: str) -> T_co | None:
        return None if value is None else self._kind.check(value, where)

    def __str__(self) -> str:
        return f"null or {self._kind}"


class ListOf(Kind[list[T]]):
    """A bounded number of values of one kind."""

    def __init__(self, kind: Kind[T], longest: int = 2**20, shortest: int = 0) -> None:
        self._kind = kind
        self._longest = longest
        self._shortest = shortest

    @override
    def check(self, value: Any, where: str) -> list[T]:
        if type(value) is not list or not self._shortest <= len(value) <= self._longest:
            self.refuse(value, where)
        check = self._kind.check
        try:
            return [check(item, where) for item in value]
        except RefusedError:  # checked again to find which one; the usual case need not build names
            return [check(item, f"{where}[{number}]") for number, item in enumerate(value)]

    def __str__(self) -> str:
        return f"a list of {self._shortest} to {self._longest} values"


class TupleOf(Kind[Any]):
    """A list of fixed length with a kind for each of its values."""

    def __init__(self, *kinds: Kind[Any]) -> None:
        self._kinds = kinds

    @override
    def check(self, value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(self._kinds):
            self.refuse(value, where)
        return tuple(
            kind.check(item, f"{where}[{number}]")
            for number, (kind, item) in enumerate(zip(self._kinds, value, strict=True))
        )

    def __str__(self) -> str:
        return f"a list of {len(self._kinds)} values"


class MapOf(Kind[dict[str, T]]):
    """An object whose names are of one kind and whose values are of another."""

    def __init__(self, kind: Kind[T], longest: int = 2**16, names: Kind[str] | None = None) -> None:
        self._kind = kind
        self._longest = longest
        self._names = names or Text()

    @override
    def check(self, value: Any, where: str) -> dict[str, T]:
        if type(value) is not dict or len(value) > self._longest:
            self.refuse(value, where)
        names, check = self._names.check, self._kind.check
        try:
            return {names(name, where): check(item, where) for name, item in value.items()}
        except RefusedError:  # checked again to find which one
            for name, item in value.items():
                names(name, f"a name in {where}")
                check(item, f"{where}[{name!r}]")
            raise

    def __str__(self) -> str:
        return f"an object with up to {self._longest} names"


class Fields(Kind[dict[str, Any]]):
    """An object with all of these names, any of the optional ones, and no others."""

    def __init__(
        self, fields: Mapping[str, Kind[Any]], optional: Mapping[str, Kind[Any]] | None = None
    ) -> None:
        self.fields = dict(fields)
        self.optional = dict(optional or {})
        self._kinds = {**self.optional, **self.fields}

    @override
    def check(self, value: Any, where: str) -> dict[str, Any]:
        """Missing optional names are missing in the result."""
        if type(value) is not dict:
            self.refuse(value, where)
        for name in self.fields:
            if name not in value:
                raise RefusedError(f"expected {where} with {name!r}, {self._kinds[name]}; got none.")
        fields, nested = {}, not where.startswith("the ")
        for name, item in value.items():
            kind = self._kinds.get(name)
            if kind is None:
                names = ", ".join(self._kinds) or "nothing"
                raise RefusedError(f"expected {where} with {names} alone, got {shown(name)} as well.")
            try:
                fields[name] = kind.check(item, where if nested else name)
            except RefusedError:  # checked again to say where; the usual case need not build names
                fields[name] = kind.check(item, f"{where}[{name!r}]" if nested else name)
        return fields

    def __str__(self) -> str:
        return f"an object with {', '.join(self._kinds) or 'nothing'}"


class _Field(NamedTuple):
    """A declared field of a `Head`."""

    kind: Kind[Any]
    optional: bool = False
    default: Any = None


def field(kind: Kind[T]) -> T:
    """A field that a head must have."""
    return cast("T", _Field(kind))


def optional(kind: Kind[T], *, default: D = None) -> T | D:  # type: ignore[assignment]
    """A field that may be missing, which reads as `default`."""
    return cast("T | D", _Field(kind, True, default))


@dataclass_transform(kw_only_default=True, field_specifiers=(field, optional))
class Head:
    """The fields of a call, of an answer, or of an object in one of them.

    A subclass declares each field with its type and its kind, which mypy compares:

        class Erase(Head):
            table: str = field(Text())

    A head is sent as exactly the fields that it was made with, in their order.
    """

    declaration: ClassVar[Fields] = Fields({})

    def __init_subclass__(cls) -> None:
        required: dict[str, Kind[Any]] = {}
        may_miss: dict[str, Kind[Any]] = {}
        for base in cls.__bases__:
            if issubclass(base, Head):
                required |= base.declaration.fields
                may_miss |= base.declaration.optional
        for name, declared in [item for item in vars(cls).items() if isinstance(item[1], _Field)]:
            if declared.optional:
                may_miss[name] = declared.kind
                setattr(cls, name, declared.default)
            else:
                may_miss.pop(name, None)
                required[name] = declared.kind
                delattr(cls, name)
        cls.declaration = Fields(required, may_miss)

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    def as_json(self) -> dict[str, Any]:
        """The object that is sent."""
        return vars(self)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


S = TypeVar("S", bound=Head)


class Struct(Kind[S]):
    """Objects that become heads of a class."""

    def __init__(self, head: type[S]) -> None:
        self.head = head
        self.optional = head.declaration.optional

    @override
    def check(self, value: Any, where: str) -> S:
        return self.head(**self.head.declaration.check(value, where))

    def __str__(self) -> str:
        return str(self.head.declaration)


class Variant(Kind[T_co | S_co]):
    """An object of one of two kinds: the first if it has a certain name, otherwise the second."""

    def __init__(self, name: str, with_name: Kind[T_co], without: Kind[S_co]) -> None:
        self._name = name
        self._with = with_name
        self._without = without

    @override
    def check(self, value: Any, where: str) -> T_co | S_co:
        if type(value) is not dict:
            self.refuse(value, where)
        return (self._with if self._name in value else self._without).check(value, where)

    def __str__(self) -> str:
        return f"{self._with}, or {self._without}"


class Plain(Kind[Any]):
    """Any JSON value: for what a service passes on without looking into it.

    test: a condition that it must fulfil; text: its description for error messages.
    """

    def __init__(self, test: Callable[[Any], bool] | None = None, text: str = "anything") -> None:
        self._test = test
        self._text = text

    @override
    def check(self, value: Any, where: str) -> Any:
        if self._test is not None and not self._test(value):
            self.refuse(value, where)
        return value

    def __str__(self) -> str:
        return self._text


def shown(value: Any) -> str:
    """A received value, short enough for an error message."""
    if isinstance(value, list | dict | str) and len(value) > _SHOWN:  # without formatting all of it
        what = {list: "a list", dict: "an object"}.get(type(value), "text")
        return f"{what} of length {len(value)}"
    if type(value) is int and abs(value) >= 2**128:
        return f"a number of {value.bit_length()} bits"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


# Declarations of calls: the head and arrays of a call and of its answer.
#
#     keys = ArrayKind("keys", "int64", "n")
#     ERASE = Call("erase", Struct(Erase), [keys], answer=Struct(Rows))
#
# A service has one table of such declarations (`karvan.wire.server`) and checks every call against it before
# any code of its own runs. Its clients call by the declaration, which checks the answer: a malicious service,
# or one of another version, cannot make its caller read beyond an array either.
#
# Sizes of arrays are numbers, or names, which mean the same size everywhere within one message, or functions
# of the head. What depends on the state of a service, such as the dim of a table, is checked first thing in
# the service, with `expect_array`.


# Functions of a head get the call's, or, for the arrays of an answer, the answer's joined with the call's.
Size: TypeAlias = int | str | Callable[[Any], int]

ANY = "*"  # any size

# The fields that the wire itself adds to the head of a call, of an answer, and of a hello.
_OF_CALLS = frozenset({"method", "number", "received", "within", "arrays"})
_OF_ANSWERS = frozenset({"number", "arrays"})
_OF_HELLOS = frozenset({"method", "session", "connection", "patience", "deadline", "arrays"})


class ArrayKind:
    """An array of a message: its name for error messages, its dtype and its shape.

    dtype: one, or several that are allowed, or a function of the head that returns it.
    """

    def __init__(self, name: str, dtype: str | tuple[str, ...] | Callable[[Any], str], *shape: Size) -> None:
        self.name = name
        self._dtype = dtype
        self._shape = shape

    def check(self, array: Array, head: Any, sizes: dict[str, int], where: str) -> None:
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

    count: Callable[[Any], int]
    arrays: Sequence[ArrayKind]


@dataclass(frozen=True)
class DescribedArrays:
    """Arrays that the head describes, such as those of a batch; the call's `rule` checks them."""

    most: int = 1024


@dataclass(frozen=True)
class OptionalArrays:
    """Arrays that are all present, or all absent, as the head says."""

    present: Callable[[Any], bool]
    arrays: Sequence[ArrayKind]


Declared: TypeAlias = ArrayKind | ForEach | DescribedArrays | OptionalArrays


class _Joined:
    """The fields of several heads; those of an earlier one hide those of a later one."""

    def __init__(self, *heads: Any) -> None:
        self._heads = [Head(**head) if isinstance(head, Mapping) else head for head in heads]

    def __getattr__(self, name: str) -> Any:
        for head in self._heads:
            if hasattr(head, name):
                return getattr(head, name)
        raise AttributeError(name)


_NOTHING: Any = Struct(Head)
H = TypeVar("H", default=Head)
A = TypeVar("A", default=Head)


@dataclass(frozen=True)
class Call(Generic[H, A]):
    """The declaration of a call.

    rule: a check across several parts of a call; called with the checked head and the arrays.
    answer: the head of the answer; answers: its arrays, whose functions look fields up in the answer's head
    first and then in the call's head; answer_rule: as `rule`, for the answer.
    """

    name: str
    head: Kind[H] = _NOTHING
    arrays: Sequence[Declared] = ()
    answer: Kind[A] = _NOTHING
    answers: Sequence[Declared] = ()
    rule: Callable[[H, Sequence[Array]], None] | None = None
    answer_rule: Callable[[A, Sequence[Array]], None] | None = None

    def check(self, call: Message) -> H:
        """The checked head of a call without the wire's own fields; a RefusedError says what is wrong."""
        try:
            head = self.head.check(_without(call.head, _OF_CALLS), "the head")
            _check_arrays(self.arrays, call.arrays, head)
            if self.rule is not None:
                self.rule(head, call.arrays)
        except RefusedError as error:
            raise RefusedError(f"{self.name}: {error}") from None
        return head

    def check_answer(self, call_head: Any, answer: Message) -> Message[A]:
        """The checked answer to a call with that head; a RefusedError says what is wrong."""
        try:
            head = self.answer.check(_without(answer.head, _OF_ANSWERS), "the answer")
            _check_arrays(self.answers, answer.arrays, _Joined(head, call_head))
            if self.answer_rule is not None:
                self.answer_rule(head, answer.arrays)
        except RefusedError as error:
            raise RefusedError(f"the answer to {self.name}: {error}") from None
        return Message(head, answer.arrays)


CallTable: TypeAlias = Mapping[str, Call[Any, Any]]


def table_of(*calls: Call[Any, Any]) -> dict[str, Call[Any, Any]]:
    """Calls by their names."""
    table = {call.name: call for call in calls}
    if len(table) != len(calls):
        raise ValueError("Expected each call to be declared once.")
    return table


def hello_fields(hello: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a caller's hello without those that the wire itself has added."""
    return _without(hello, _OF_HELLOS)


def expect_array(array: Array, what: str, dtype: str, *shape: int) -> Array:
    """The array; a RefusedError unless it has this dtype and shape, which depend on the service's state."""
    if array.dtype.name != dtype or array.shape != shape:
        raise RefusedError(
            f"expected {what} to be {dtype} {list(shape)}, got {array.dtype.name} {list(array.shape)}."
        )
    return array


def _without(head: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in head.items() if name not in names}


def _check_arrays(declared: Sequence[Declared], arrays: Sequence[Array], head: Any) -> None:
    if any(isinstance(part, DescribedArrays) for part in declared):
        (array_type,) = declared
        assert isinstance(array_type, DescribedArrays)
        if len(arrays) > array_type.most:
            raise RefusedError(f"expected up to {array_type.most} arrays, got {len(arrays)}.")
        return
    expected = list(_expanded(declared, head, len(arrays)))
    if len(expected) != len(arrays):
        names = ", ".join(where for _, _, where in expected[:8]) or "none"
        raise RefusedError(f"expected {len(expected)} arrays ({names}), got {len(arrays)}.")
    for (kind, sizes, where), array in zip(expected, arrays, strict=True):
        kind.check(array, head, sizes, where)


def _expanded(
    declared: Sequence[Declared], head: Any, received: int
) -> Iterator[tuple[ArrayKind, dict[str, int], str]]:
    """Each expected array, with the sizes known within its repetition, and its name."""
    common: dict[str, int] = {}
    for part in declared:
        if isinstance(part, ArrayKind):
            yield part, common, part.name
        elif isinstance(part, OptionalArrays):
            if part.present(head):
                yield from ((kind, common, kind.name) for kind in part.arrays)
        elif isinstance(part, ForEach):
            repetitions = part.count(head)
            if repetitions * len(part.arrays) > received:
                raise RefusedError(f"expected {repetitions * len(part.arrays)} arrays, got {received}.")
            for number in range(repetitions):
                sizes: dict[str, int] = {}
                yield from ((kind, sizes, f"{kind.name}[{number}]") for kind in part.arrays)
