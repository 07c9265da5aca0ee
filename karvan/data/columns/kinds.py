"""The kinds of columns, which decide whether a value becomes the same id on another day.

`10115` read as a number and as text are two ids, and so is a day read as a date and as a timestamp. Widths do
not matter: a batch has int64 of every integer. Floats and booleans are numbers too: floats are no ids, which
tables and hashes refuse, and a boolean is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from karvan.data.columns.declarations import is_number, is_text, unnest
from karvan.data.errors import DataError
from karvan.data.source import Source

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
