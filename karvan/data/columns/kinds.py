"""Types of columns: their names, one type for the files of a data set, and kinds.

The *kind* of a column decides whether a value becomes the same id on another day.
`10115` read as a number and as text are two ids, and so is a day read as a date and as a timestamp. Widths do
not matter: a batch has int64 of every integer. Floats and booleans are numbers too: floats are no ids, which
tables and hashes refuse, and a boolean is 0 or 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from karvan.data.columns.declarations import is_number, is_text, unnest
from karvan.data.errors import DataError
from karvan.data.source import Source

# One type for a column whose type differs between files.
#
# Files of one data set are often written by several programs, or by pandas, which chooses types by the
# values that it sees. Types that hold the same values in different widths are widened. A mix that would lose
# information, such as integers and floats, stays an error.

# Types by name: `int64`, `string`, `list<int64>`, `map<int64, float32>`.


_NESTED = re.compile(r"\s*(list|map)\s*<(.*)>\s*", re.DOTALL)
_EXAMPLES = (
    "int64, float32, bool, string, date32, timestamp[us], list<int64>, list<list<int64>>, map<int64, float32>"
)


def type_of(type_: str | pa.DataType, column: str) -> pa.DataType:
    """The type with this name; a type is returned as it is."""
    if isinstance(type_, pa.DataType):
        return type_
    if not isinstance(type_, str):
        raise TypeError(
            f"The type of column '{column}' must be a name such as {_EXAMPLES}, or a pyarrow type, "
            f"but is {type(type_).__name__}."
        )
    try:
        return _parse(type_)
    except ValueError:
        raise ValueError(
            f"The type of column '{column}' must be one such as {_EXAMPLES}, but is {type_!r}."
        ) from None


def _parse(text: str) -> pa.DataType:
    nested = _NESTED.fullmatch(text)
    if nested is None:
        name = text.strip()
        if not name.islower():  # Arrow would take capital letters
            raise ValueError(name)
        return pa.type_for_alias({"float": "float32", "double": "float64"}.get(name, name))
    if nested[1] == "list":
        return pa.list_(_parse(nested[2]))
    key, _, item = nested[2].partition(",")
    return pa.map_(_parse(key), _parse(item))


def common_type(
    column: str, types_of_files: Iterable[tuple[str, pa.DataType]], declared: pa.DataType | None = None
) -> pa.DataType:
    """The type that holds the values of all files; `found` are their paths and types.

    A mix of integers and floats has the type that was declared for it, if any.
    """
    result, source = pa.null(), ""
    for path, type_ in types_of_files:
        both = widest(result, type_)
        if both is None and declared is not None and _is_mix(result, type_):
            both = declared
        if both is None:
            hint = (
                " (pandas turns integers into floats where one is missing; its type Int64 does not), or "
                "declare their type, Fixed(…, dtype=torch.int64)"
            )
            raise DataError(
                f"Expected the type {result}, as in {source}, but it is {type_}. Write the files with one "
                f"type{hint if _is_mix(result, type_) else ''}, or read them separately.",
                path=path,
                column=column,
            )
        if both != result:
            result, source = both, path
    return result


def _is_mix(a: pa.DataType, b: pa.DataType) -> bool:
    return any(map(types.is_integer, (a, b))) and any(map(types.is_floating, (a, b)))


def widest(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if every such type would lose information."""
    if a == b or types.is_null(b):
        return a
    if types.is_null(a):
        return b
    if types.is_dictionary(a) or types.is_dictionary(b):
        return widest(*(type_.value_type if types.is_dictionary(type_) else type_ for type_ in (a, b)))
    if is_text(a) and is_text(b):
        is_string = (types.is_string, types.is_large_string, types.is_string_view)
        strings = all(any(is_kind(type_) for is_kind in is_string) for type_ in (a, b))
        return pa.large_string() if strings else pa.large_binary()
    for common in (_integers, _floats, _times, _lists, _fields):
        type_ = common(a, b)
        if type_ is not None:
            return type_
    return None


def _integers(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if not (types.is_integer(a) and types.is_integer(b)):
        return None
    if types.is_signed_integer(a) == types.is_signed_integer(b):
        return max(a, b, key=lambda type_: type_.bit_width)
    return pa.int64()  # unsigned 64-bit ids keep their bits, as in a batch


def _floats(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if types.is_floating(a) and types.is_floating(b):
        return max(a, b, key=lambda type_: type_.bit_width)
    number = all(types.is_floating(type_) or types.is_decimal(type_) for type_ in (a, b))
    return pa.float64() if number else None


def _times(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if types.is_date(a) and types.is_date(b):
        return pa.date32()
    if types.is_timestamp(a) and types.is_timestamp(b) and (a.tz is None) == (b.tz is None):
        return pa.timestamp("us", None if a.tz is None else "UTC")  # as they are decoded
    if types.is_time(a) and types.is_time(b):
        return pa.time64("us")
    return pa.duration("us") if types.is_duration(a) and types.is_duration(b) else None


def _lists(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if types.is_fixed_size_list(a) and types.is_fixed_size_list(b) and a.list_size == b.list_size:
        inner = widest(a.value_type, b.value_type)
        return None if inner is None else pa.list_(inner, a.list_size)
    if not all(types.is_list(type_) or types.is_large_list(type_) for type_ in (a, b)):
        return None
    inner = widest(a.value_type, b.value_type)
    if inner is None:
        return None
    return pa.list_(inner) if types.is_list(a) and types.is_list(b) else pa.large_list(inner)


def _fields(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if types.is_map(a) and types.is_map(b):
        key, item = widest(a.key_type, b.key_type), widest(a.item_type, b.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if not (types.is_struct(a) and types.is_struct(b)) or a.names != b.names:
        return None
    fields = [(name, widest(a.field(name).type, b.field(name).type)) for name in a.names]
    return None if any(type_ is None for _, type_ in fields) else pa.struct(fields)


_TEMPORAL = (
    ("dates", types.is_date),
    ("times", types.is_timestamp),
    ("times of day", types.is_time),
    ("durations", types.is_duration),
)


class ColumnKind(NamedTuple):
    """The kind of a column, and which file shows it: its name and folder, wherever the data lies."""

    kind: str
    where: str


def kind_of(type_: pa.DataType) -> str | None:
    """The kind of the values, or of those in lists; None for a type that does not tell, such as null."""
    _, leaf = unnest(type_)
    if types.is_struct(leaf) and leaf.num_fields:
        leaf = leaf.field(0).type
    if types.is_dictionary(leaf):
        leaf = leaf.value_type
    for kind, is_kind in _TEMPORAL:
        if is_kind(leaf):
            return kind
    if is_number(leaf):
        return "numbers"
    return "text" if is_text(leaf) else None


def kinds_of(source: Source, decode: Any) -> dict[str, ColumnKind]:
    """The kinds of the columns that are read, by name."""
    schema = source.schema
    first = getattr(source, "first_of_kind", lambda name: None)
    part = next((part.path for part in source.parts()), "the data")
    names = getattr(decode, "names", schema.names)
    kinds = {name: kind_of(schema.field(name).type) for name in names if name in schema.names}
    return {
        name: ColumnKind(kind, _short(first(name) or part))
        for name, kind in kinds.items()
        if kind is not None
    }


def _short(path: str) -> str:
    """The last folder and the name: checkpoints do not depend on where data lies, and have no credentials."""
    return "/".join(path.split("/")[-2:])


def require_equal(before: Mapping[str, ColumnKind], now: Mapping[str, ColumnKind]) -> None:
    """Raise a DataError for a column that has another kind now than it had in the data of the model."""
    for name, (kind, where) in now.items():
        trained = before.get(name)
        if trained is None or trained.kind == kind:
            continue
        as_text = f'a CSV file has text by options={{"schema": {{"{name}": "string"}}}}'
        advice = (
            f"Read it as text: {as_text}."
            if trained.kind == "text"
            else f"Write it as before, or train a new model with one kind for all days: {as_text}."
        )
        if (trained.kind, kind) == ("numbers", "text"):
            advice += (
                f' For a quantity, {{"schema": {{"{name}": "float64"}}}} shows the cell that is no number, '
                'and options={"nulls": ["", "n/a"]} names cells without a value.'
            )
        raise DataError(
            f"Expected {trained.kind}, as in {trained.where} when the model was trained, got {kind}: the "
            f"same values would have other ids. {advice} Omit the column from columns=[…] if no feature "
            "uses it.",
            path=where,
            column=name,
        )
