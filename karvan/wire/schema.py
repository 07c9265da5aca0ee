"""The schema of calls: kinds of values with bounds, and calls made of them."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    NoReturn,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import TypeVar, dataclass_transform, override

from karvan.errors import RefusedError
from karvan.wire.message import Array, Message

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
_SHOWN = 80  # characters of a value in a message
_MOST_NAMES = 2**16  # of an object, unless its declaration says how many
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)


class Kind(Generic[T_co]):
    """A set of values: those that pass a test. Some kinds also convert a value, or check what is in it.

    text: describes the kind in error messages, such as "a whole number from 0 to 3".
    """

    def __init__(self, text: str, test: Callable[[Any], bool]) -> None:
        self._text = text
        self._test = test

    def check(self, value: Any, where: str) -> T_co:
        """The value, ready for use; otherwise a RefusedError that names `where` in the message it is."""
        if not self._test(value):
            self.refuse(value, where)
        return value  # type: ignore[no-any-return]

    def refuse(self, value: Any, where: str) -> NoReturn:
        """Say what was expected and what was received."""
        raise RefusedError(f"expected {where} to be {self}, got {shown(value)}.")

    def __str__(self) -> str:
        return self._text


Declared: TypeAlias = Kind[T] | type[T]  # what declares a kind: itself, or a type that `kind_of` knows


class Integer(Kind[int]):
    """A whole number within bounds, both included."""

    def __init__(self, least: int = 0, most: int = 2**53) -> None:
        text = f"a whole number from {least} to {most}"
        super().__init__(text, lambda value: type(value) is int and least <= value <= most)


class Float(Kind[float]):
    """A number within bounds, both included; finite: neither infinite nor NaN."""

    def __init__(self, least: float = -math.inf, most: float = math.inf, *, finite: bool = True) -> None:
        def fits(value: Any) -> bool:
            if type(value) is not float:
                return False
            return least <= value <= most if math.isfinite(value) else not finite

        bounds = "" if least == -math.inf and most == math.inf else f" from {least:g} to {most:g}"
        super().__init__(f"a {'finite ' if finite else ''}number{bounds}", fits)

    @override
    def check(self, value: Any, where: str) -> float:
        if type(value) is int and -(2**1000) < value < 2**1000:
            value = float(value)
        return super().check(value, where)


class Boolean(Kind[bool]):
    """True or false."""

    def __init__(self) -> None:
        super().__init__("true or false", lambda value: type(value) is bool)


class Text(Kind[str]):
    """Text of a bounded number of characters."""

    def __init__(self, longest: int = 200, shortest: int = 1) -> None:
        def fits(value: Any) -> bool:
            return type(value) is str and shortest <= len(value) <= longest and _is_encodable(value)

        super().__init__(f"text of {shortest} to {longest} characters", fits)


def _is_encodable(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON may contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class OneOf(Kind[str]):
    """One of several texts."""

    def __init__(self, *choices: str) -> None:
        text = f"one of {', '.join(map(repr, choices))}"
        super().__init__(text, lambda value: type(value) is str and value in choices)


class Plain(Kind[Any]):
    """Any JSON value: for what a service passes on without looking into it.

    test: a condition that it must fulfil; text: its description for error messages.
    """

    def __init__(self, test: Callable[[Any], bool] | None = None, text: str = "anything") -> None:
        super().__init__(text, test or (lambda value: True))


class Nullable(Kind[Any]):
    """Null, or a value of another kind."""

    def __init__(self, hint: Any) -> None:
        self._kind = kind_of(hint)
        super().__init__(f"null or {self._kind}", lambda value: True)

    @override
    def check(self, value: Any, where: str) -> Any:
        return None if value is None else self._kind.check(value, where)


class ListOf(Kind[list[Any]]):
    """A bounded number of values of one kind."""

    def __init__(self, hint: Any, longest: int = 2**20, shortest: int = 0) -> None:
        self._kind = kind_of(hint)
        text = f"a list of {shortest} to {longest} values"
        super().__init__(text, lambda value: type(value) is list and shortest <= len(value) <= longest)

    @override
    def check(self, value: Any, where: str) -> list[Any]:
        items, check = super().check(value, where), self._kind.check
        try:
            return [check(item, where) for item in items]
        except RefusedError:  # checked again to find which one; the usual case need not build names
            return [check(item, f"{where}[{number}]") for number, item in enumerate(items)]


class TupleOf(Kind[Any]):
    """A list of fixed length with a kind for each of its values."""

    def __init__(self, *hints: Any) -> None:
        self._kinds = [kind_of(hint) for hint in hints]
        text = f"a list of {len(hints)} values"
        super().__init__(text, lambda value: type(value) is list and len(value) == len(hints))

    @override
    def check(self, value: Any, where: str) -> tuple[Any, ...]:
        items = zip(self._kinds, super().check(value, where), strict=True)
        return tuple(kind.check(item, f"{where}[{number}]") for number, (kind, item) in enumerate(items))


class MapOf(Kind[dict[str, Any]]):
    """An object whose names are of one kind and whose values are of another."""

    def __init__(self, hint: Any, longest: int = _MOST_NAMES, names: Any = None) -> None:
        self._kind = kind_of(hint)
        self._names = kind_of(names or Text())
        text = f"an object with up to {longest} names"
        super().__init__(text, lambda value: type(value) is dict and len(value) <= longest)

    @override
    def check(self, value: Any, where: str) -> dict[str, Any]:
        items, names, check = super().check(value, where), self._names.check, self._kind.check
        try:
            return {names(name, where): check(item, where) for name, item in items.items()}
        except RefusedError:  # checked again to find which one
            for name, item in items.items():
                names(name, f"a name in {where}")
                check(item, f"{where}[{name!r}]")
            raise


class Fields(Kind[dict[str, Any]]):
    """An object with all of these names, any of the optional ones, and no others."""

    def __init__(self, fields: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> None:
        self.fields = {name: kind_of(hint) for name, hint in fields.items()}
        self.optional = {name: kind_of(hint) for name, hint in (optional or {}).items()}
        self._kinds = {**self.optional, **self.fields}
        text = f"an object with {', '.join(self._kinds) or 'nothing'}"
        super().__init__(text, lambda value: type(value) is dict)

    @override
    def check(self, value: Any, where: str) -> dict[str, Any]:
        """Missing optional names are missing in the result."""
        items = super().check(value, where)
        for name in self.fields:
            if name not in items:
                raise RefusedError(f"expected {where} with {name!r}, {self._kinds[name]}; got none.")
        fields, nested = {}, not where.startswith("the ")
        for name, item in items.items():
            kind = self._kinds.get(name)
            if kind is None:
                names = ", ".join(self._kinds) or "nothing"
                raise RefusedError(f"expected {where} with {names} alone, got {shown(name)} as well.")
            try:
                fields[name] = kind.check(item, where if nested else name)
            except RefusedError:  # checked again to say where; the usual case need not build names
                fields[name] = kind.check(item, f"{where}[{name!r}]" if nested else name)
        return fields


@dataclass_transform(kw_only_default=True)
class Head:
    """The fields of a call, of an answer, or of an object in one of them.

    A subclass declares each field by its type, from which its kind follows (see `kind_of`). A field with a
    default may be missing; if the default is None, that does not make null one of its values:

        Name = Annotated[str, Text(100)]

        class Erase(Head):
            table: Name
            keys: list[int]
            reason: Name | None = None

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
        hints = get_type_hints(cls, include_extras=True)
        for name in cls.__annotations__:
            if name in vars(cls):
                may_miss[name] = kind_of(hints[name], null=vars(cls)[name] is not None)
            else:
                may_miss.pop(name, None)
                required[name] = kind_of(hints[name])
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
        super().__init__(str(head.declaration), lambda value: True)

    @override
    def check(self, value: Any, where: str) -> S:
        return self.head(**self.head.declaration.check(value, where))


class Variant(Kind[T_co | S_co]):
    """An object of one of two kinds: the first if it has a certain name, otherwise the second."""

    def __init__(self, name: str, with_name: Declared[T_co], without: Declared[S_co]) -> None:
        self._name = name
        self._with, self._without = kind_of(with_name), kind_of(without)
        super().__init__(f"{self._with}, or {self._without}", lambda value: type(value) is dict)

    @override
    def check(self, value: Any, where: str) -> T_co | S_co:
        super().check(value, where)
        kind: Kind[T_co | S_co] = self._with if self._name in value else self._without
        return kind.check(value, where)


_BY_TYPE: dict[Any, Kind[Any]] = {Any: Plain(), bool: Boolean(), int: Integer(), float: Float(), str: Text()}


class Length(NamedTuple):
    """The bounds of a list or an object in a declaration: `Annotated[list[Name], Length(64)]`."""

    longest: int
    shortest: int = 0


def kind_of(hint: Any, *, null: bool = True, length: Sequence[int] = ()) -> Kind[Any]:
    """The kind that a type declares; with null=False, that of `X | None` is the kind of X.

    | type | kind |
    |---|---|
    | `Annotated[int, Integer(0, 9)]` | the kind in it |
    | a `Head` | `Struct` |
    | `bool`, `Any` | `Boolean`, `Plain` |
    | `int`, `float`, `str` | `Integer()`, `Float()`, `Text()`, which have bounds, too |
    | `X | None` | `Nullable` |
    | `list[X]`, `Sequence[X]`, `tuple[X, Y]` | `ListOf`, `TupleOf` |
    | `dict[N, X]`, `Mapping[N, X]` | `MapOf`, with names of N |
    """
    if isinstance(hint, Kind):
        return hint
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = args[1]
        return bounds if isinstance(bounds, Kind) else kind_of(args[0], null=null, length=bounds)
    if origin in (Union, types.UnionType):
        (hint,) = (arg for arg in args if arg is not type(None))
        return Nullable(hint) if null else kind_of(hint)
    if origin in (list, Sequence):
        return ListOf(args[0], *length)
    if origin is tuple:
        return TupleOf(*args)
    if origin in (dict, Mapping):
        names, values = args
        return MapOf(values, length[0] if length else _MOST_NAMES, names)
    return _BY_TYPE[hint] if hint in _BY_TYPE else Struct(hint)


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
#     ERASE = Call("erase", Erase, [keys], answer=Rows)
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


Arrays: TypeAlias = ArrayKind | ForEach | DescribedArrays | OptionalArrays


class _Joined:
    """The fields of several heads; those of an earlier one hide those of a later one."""

    def __init__(self, *heads: Any) -> None:
        self._heads = [Head(**head) if isinstance(head, Mapping) else head for head in heads]

    def __getattr__(self, name: str) -> Any:
        for head in self._heads:
            if hasattr(head, name):
                return getattr(head, name)
        raise AttributeError(name)


_NOTHING: Any = Head
H = TypeVar("H", default=Head)
A = TypeVar("A", default=Head)


class Call(Generic[H, A]):
    """The declaration of a call.

    head: the fields of the call, a `Head` or a kind; arrays: its arrays; answer and answers: the same of the
    answer, whose functions look fields up in the answer's head first and then in the call's head. rule: a
    check across several parts of a call; called with the checked head and the arrays. answer_rule: as `rule`,
    for the answer.
    """

    def __init__(
        self,
        name: str,
        head: Declared[H] = _NOTHING,
        arrays: Sequence[Arrays] = (),
        answer: Declared[A] = _NOTHING,
        answers: Sequence[Arrays] = (),
        rule: Callable[[H, Sequence[Array]], None] | None = None,
        answer_rule: Callable[[A, Sequence[Array]], None] | None = None,
    ) -> None:
        self.name = name
        self.head: Kind[H] = kind_of(head)
        self.answer: Kind[A] = kind_of(answer)
        self._arrays, self._answers = arrays, answers
        self._rule, self._answer_rule = rule, answer_rule

    def check(self, call: Message) -> H:
        """The checked head of a call without the wire's own fields; a RefusedError says what is wrong."""
        try:
            head = self.head.check(_without(call.head, _OF_CALLS), "the head")
            _check_arrays(self._arrays, call.arrays, head)
            if self._rule is not None:
                self._rule(head, call.arrays)
        except RefusedError as error:
            raise RefusedError(f"{self.name}: {error}") from None
        return head

    def check_answer(self, call_head: Any, answer: Message) -> Message[A]:
        """The checked answer to a call with that head; a RefusedError says what is wrong."""
        try:
            head = self.answer.check(_without(answer.head, _OF_ANSWERS), "the answer")
            _check_arrays(self._answers, answer.arrays, _Joined(head, call_head))
            if self._answer_rule is not None:
                self._answer_rule(head, answer.arrays)
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


def _check_arrays(declared: Sequence[Arrays], arrays: Sequence[Array], head: Any) -> None:
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
    declared: Sequence[Arrays], head: Any, received: int
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
