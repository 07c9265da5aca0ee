"""Declarations of columns: `Fixed`, `Varlen`, `Raw`, and `infer`.

| declared | the column may hold | the batch gets |
|---|---|---|
| `Fixed` | numbers, booleans, dates; lists of `length` of them | a tensor (rows,) or (rows, length) |
| `Varlen` | numbers or, with `hash`, strings; lists of them; `{id: weight}` | a `Ragged`, with weights |
| `Varlen` | lists of lists of them | a `NestedRagged` |
| `Raw` | strings or bytes; lists of them | a `Ragged` or `NestedRagged` of uint8 |

Integers of every width become int64 (the bits of an unsigned 64-bit id stay the same), floats and decimals
become float32, so that a model sees the same values whichever program wrote a file. Timestamps become
microseconds and dates days since 1970.

A missing value (null) stays visible unless a `default` replaces it:

| the column holds | null becomes |
|---|---|
| floats, decimals, or anything with a floating-point `dtype` | NaN |
| integers, booleans, dates | no value: the batch gets an `OptionalRagged` with an empty row there |
| strings | no string: the batch gets an `OptionalText` with an empty row there |
| lists | an empty list; a `Fixed` of floats gets NaN, a `Fixed` of integers is a `DataError` |
| null inside a list of floats | NaN |
| null inside a list of ids or strings | removed from the list; a `Fixed` of integers is a `DataError` |
| a null weight | a `DataError` |

A column in which the first file is known to have nulls (by the footer of Parquet, the first lines of CSV, or
all rows of a frame) has these kinds in every batch. If there is none, batches get the plain tensor up to the
first null. In a label null is a `DataError`; see `Decoder.labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import torch
from pyarrow import types

from karvan import ids
from karvan.data.errors import DataError

Number = int | float | bool


@dataclass(frozen=True)
class Fixed:
    """Declare a column with a fixed number of numbers per row.

    Args:
        name: The name of the column.
        default: Replaces null, and an empty list: one number for all positions, or one for each. Without it
            they are missing values.
        length: How many numbers a row has.
        dtype: The type of the tensor; by default int64, float32 or bool, by the column's type. Floats with an
            integer dtype must be whole numbers, and NaN counts as null: use it for ids that pandas has turned
            into floats because some are missing.

    Raises:
        ValueError: The length is below 1, or there is another number of defaults.
        TypeError: A default is no number.

    Example:
        >>> columns = [kv.data.Fixed("price", default=0.0), kv.data.Fixed("user")]
        >>> data = kv.data.read(
        ...     {"user": [7, 8], "price": [1.5, None]}, 2, columns=columns
        ... )
        >>> next(iter(data))["price"]
        tensor([1.5000, 0.0000])
    """

    name: str
    default: Number | Sequence[Number] | None = None
    length: int = 1
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"Fixed '{self.name}' needs a length of at least 1, but has {self.length}.")
        numbers = self.defaults() if not isinstance(self.default, str) else [self.default]
        if wrong := [number for number in numbers or () if not isinstance(number, Number)]:
            raise TypeError(f"Fixed '{self.name}' needs numbers as default, but has {wrong[0]!r}.")
        if isinstance(self.default, Sequence) and len(self.default) != self.length:
            raise ValueError(
                f"Fixed '{self.name}' needs one default or {self.length}, but has {len(self.default)}."
            )

    def defaults(self) -> list[Number] | None:
        """Return the default of each position.

        Returns:
            The defaults; None if there is none.
        """
        if self.default is None:
            return None
        return list(self.default) if isinstance(self.default, Sequence) else [self.default] * self.length


@dataclass(frozen=True)
class Varlen:
    """Declare a column with any number of values per row.

    Strings become ids.

    Args:
        name: The name of the column.
        hash: The hash that makes ids of strings: "farm" or "murmur". "farm63" and "murmur63" drop the sign
            bit, as RecIS does while reading.
        bucket: Ids are the hash, read as unsigned, modulo this. 0 drops the sign bit only. By default the id
            has all 64 bits.

    Raises:
        ValueError: The hash is unknown, or there is a bucket without a hash.

    Example:
        >>> columns = [kv.data.Varlen("tags", hash="farm", bucket=1000)]
        >>> data = kv.data.read({"tags": [["a", "b"], []]}, 2, columns=columns)
        >>> next(iter(data))["tags"].lengths()
        tensor([2, 0])
    """

    name: str
    hash: str | None = None
    bucket: int | None = None

    def __post_init__(self) -> None:
        if self.hash is not None:
            try:
                ids.check_hash(self.hash, self.bucket)
            except ValueError as error:
                raise ValueError(f"Varlen '{self.name}', {error}") from None
        elif self.bucket is not None:
            raise ValueError(f"Varlen '{self.name}' has a bucket but no hash that it could apply to.")


@dataclass(frozen=True)
class Raw:
    """Declare a column of strings that are kept as bytes.

    Args:
        name: The name of the column.
        default: Replaces null, for example the empty string.

    Raises:
        TypeError: The default is no string.

    Example:
        >>> data = kv.data.read({"city": ["rome"]}, 1, columns=[kv.data.Raw("city")])
        >>> bytes(next(iter(data))["city"].values)
        b'rome'
    """

    name: str
    default: str | None = None

    def __post_init__(self) -> None:
        if self.default is not None and not isinstance(self.default, str):
            raise TypeError(f"Raw '{self.name}' needs a string as default, but has {self.default!r}.")


Column = Fixed | Varlen | Raw


def infer(schema: pa.Schema) -> list[Column]:
    """Declare a column for every field of a schema.

    Numbers become `Fixed`, strings `Raw`, lists and `{id: weight}` `Varlen`. A column in which every value is
    null becomes a `Fixed` of NaN.

    Args:
        schema: The schema of the data.

    Returns:
        The columns.

    Raises:
        DataError: A field is of a type that cannot be read.

    Example:
        >>> source = kv.data.open_frame({"user": [7, 8]})
        >>> [column.name for column in kv.data.infer(source.schema)]
        ['user']
    """
    return [infer_field(field) for field in schema]


def infer_field(field: pa.Field) -> Column:
    """The column for one field; see `infer`."""
    levels, leaf = unnest(field.type)
    if types.is_fixed_size_list(field.type) and is_number(field.type.value_type) and field.type.list_size:
        return Fixed(field.name, length=field.type.list_size)
    if is_text(leaf) and levels <= 1:
        return Raw(field.name)
    if (is_number(leaf) or types.is_null(leaf)) and levels == 0:
        return Fixed(field.name)
    if (is_number(leaf) or types.is_null(leaf)) and levels <= 2:
        return Varlen(field.name)
    if levels <= 1 and is_weighted(leaf) and is_number(leaf.field(0).type):
        return Varlen(field.name)
    advice = (
        "Write its fields as columns of their own" if types.is_nested(leaf) else "Write it as numbers or text"
    )
    raise DataError(
        f"Nothing can be inferred for the type {field.type}. {advice}, or read only the other columns.",
        column=field.name,
    )


def unnest(type_: pa.DataType) -> tuple[int, pa.DataType]:
    """How many levels of lists a type has, and the type of the innermost values; a map is a list of pairs."""
    levels = 0
    while True:
        if types.is_map(type_):
            return levels + 1, pa.struct([("key", type_.key_type), ("value", type_.item_type)])
        if not is_list(type_):
            return levels, type_
        type_, levels = type_.value_type, levels + 1


_NUMBERS = (
    *(types.is_integer, types.is_floating, types.is_boolean, types.is_decimal),
    *(types.is_timestamp, types.is_date, types.is_time, types.is_duration),
)
_TEXTS = (
    *(types.is_string, types.is_large_string, types.is_string_view, types.is_fixed_size_binary),
    *(types.is_binary, types.is_large_binary, types.is_binary_view),
)


def is_list(type_: pa.DataType) -> bool:
    """Whether values are lists of any kind (maps aside)."""
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def is_number(type_: pa.DataType) -> bool:
    """Whether values become numbers, dictionary-encoded ones included."""
    leaf = type_.value_type if types.is_dictionary(type_) else type_
    return any(is_kind(leaf) for is_kind in _NUMBERS)


def is_text(type_: pa.DataType) -> bool:
    """Whether values are strings or bytes, dictionary-encoded ones included."""
    leaf = type_.value_type if types.is_dictionary(type_) else type_
    return any(is_kind(leaf) for is_kind in _TEXTS)


def is_weighted(type_: pa.DataType) -> bool:
    """Whether values are pairs of an id, or a string, and a weight."""
    if not types.is_struct(type_) or type_.num_fields != 2:
        return False
    key, weight = type_.field(0).type, type_.field(1).type
    return (types.is_integer(key) or is_text(key)) and (
        types.is_floating(weight) or types.is_integer(weight) or types.is_decimal(weight)
    )


# `column_from_settings`: a column from the data section of a job or of a configuration.


KINDS: Mapping[str, type[Column]] = {"fixed": Fixed, "varlen": Varlen, "raw": Raw}
_DTYPES = {"int64": torch.int64, "float32": torch.float32, "float64": torch.float64, "bool": torch.bool}


def column_from_settings(settings: Any) -> Column | str:
    """A column from its name, or from a mapping with `name`, `kind` (fixed) and the arguments of its kind.

    A ValueError says what is wrong.
    """
    if isinstance(settings, str):
        return settings
    if (
        not isinstance(settings, Mapping)
        or "name" not in settings
        or settings.get("kind", "fixed") not in KINDS
    ):
        raise ValueError(
            f"data.columns expects names, or mappings with a name and a kind of {', '.join(KINDS)}, "
            f"got {settings}."
        )
    arguments = dict(settings)
    name, kind = settings["name"], arguments.pop("kind", "fixed")
    allowed = [field.name for field in fields(KINDS[kind])]
    for argument in arguments:
        if argument not in allowed:
            raise ValueError(
                f"data.columns: column '{name}' of kind {kind} has no '{argument}'; it has: "
                f"{', '.join(allowed)}."
            )
    dtype = arguments.get("dtype")
    if dtype is not None:
        if dtype not in _DTYPES:
            raise ValueError(
                f"data.columns: column '{name}' expects a dtype of {', '.join(_DTYPES)}, got {dtype!r}."
            )
        arguments["dtype"] = _DTYPES[dtype]
    try:
        return KINDS[kind](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"data.columns.{name}: {error}") from error
