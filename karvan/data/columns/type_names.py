"""Types by name: `int64`, `string`, `list<int64>`, `map<int64, float32>`."""

from __future__ import annotations

import re

import pyarrow as pa

_TOKEN = re.compile(r"\s*(list|map)\s*<|\s*([a-z0-9_]+(?:\[[a-z]+\])?)\s*|\s*([,>])\s*")
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
        parsed, rest = _parse(type_)
        if rest.strip():
            raise ValueError(rest)
    except ValueError:
        raise ValueError(
            f"The type of column '{column}' must be one such as {_EXAMPLES}, but is {type_!r}."
        ) from None
    return parsed


def _parse(text: str) -> tuple[pa.DataType, str]:
    match = _TOKEN.match(text)
    if match is None:
        raise ValueError(text)
    rest = text[match.end() :]
    if match[1] == "list":
        inner, rest = _parse(rest)
        return pa.list_(inner), _expect(">", rest)
    if match[1] == "map":
        key, rest = _parse(rest)
        item, rest = _parse(_expect(",", rest))
        return pa.map_(key, item), _expect(">", rest)
    if match[2] is None:
        raise ValueError(text)
    return pa.type_for_alias({"float": "float32", "double": "float64"}.get(match[2], match[2])), rest


def _expect(mark: str, text: str) -> str:
    match = _TOKEN.match(text)
    if match is None or match[3] != mark:
        raise ValueError(text)
    return text[match.end() :]
