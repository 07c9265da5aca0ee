"""Invalid values: missing labels and weights, incomplete lists, fractions among integers.

They are detected while reading, where the file and the number of the record are known. Afterwards records are
shuffled and joined, and an error could only name a row of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from karvan.data.columns import arrow_to_torch
from karvan.data.columns.arrow_to_torch import (
    DtypeRange,
    describe_beyond,
    describe_inexact,
    first_beyond,
    first_inexact,
    limits_of,
)
from karvan.data.columns.declarations import Column, Fixed, Varlen, is_list, is_number, is_weighted, unnest
from karvan.data.errors import DataError
from karvan.data.retry import RetryingSource
from karvan.data.source import Split

MISSING_WEIGHT = (
    "The weight of an id is missing (null). Give it one where the data is written, or remove the id."
)

_Find = Callable[[pa.Array], int | None]
_Describe = Callable[[pa.Array], str]  # of the one record that was found


def missing_value(kind: str) -> str:
    """The message for a sample without a label or weight."""
    return (
        f"The {kind} is missing (null or NaN). Remove such records from the data, or, if null has a meaning, "
        f"declare its value: Fixed(…, default={'0' if kind == 'label' else '1.0'})."
    )


def missing_in_list(length: int) -> str:
    """The message for a list of integers with missing values."""
    return (
        f"Expected {length} integers, but some are missing (null or an empty list). Declare their "
        "value: Fixed(…, default=0)."
    )


def first_missing(column: Column, array: pa.Array) -> int | None:
    """The first row that has no value, or not all of them; nulls that have a default do not count."""
    filled = getattr(column, "default", None) is not None
    levels, leaf = unnest(array.type)
    nan = is_number(leaf) and arrow_to_torch.is_floating(leaf)
    if levels == 0:
        return _first(None if filled and not nan else _missing(array, filled))
    nulls = [] if filled or not array.null_count else [_first(arrow_to_torch.is_null(array))]
    if levels == 1 and is_number(leaf):
        offsets, values = arrow_to_torch.peel(array)
        at = _first(None if filled and not nan else _missing(values, filled))
        if at is not None:
            nulls.append(arrow_to_torch.row_of(offsets, at))
        if isinstance(column, Fixed) and not filled:
            nulls.append(_first(offsets[1:] == offsets[:-1]))
    return min((row for row in nulls if row is not None), default=None)


def first_missing_weight(array: pa.Array) -> int | None:
    """The first row with an id that has no weight."""
    levels, _ = unnest(array.type)
    offsets, pairs = arrow_to_torch.peel(array) if levels else (torch.arange(len(array) + 1), array)
    keys, weights = pairs.flatten()
    if not weights.null_count:
        return None
    at = _first(arrow_to_torch.is_null(weights) & ~arrow_to_torch.is_null(keys))
    return None if at is None else arrow_to_torch.row_of(offsets, at)


class ValueChecks:
    """Which columns of a loader's records must not lack values."""

    def __init__(self, decode: Any, transform: Any = None) -> None:
        self._columns: Sequence[Column] = getattr(decode, "columns", ())
        self._labels = Counter[str](getattr(decode, "labels", ()))
        self._weights = Counter[str]()
        self._transform = transform

    def require(self, labels: Sequence[str], weights: Sequence[str]) -> AbstractContextManager[Any]:
        """Make missing values of these columns errors, unless a transform computes the column.

        Until the context manager exits, if the result is used as one.
        """
        declared = {column.name for column in self._columns}
        required = [
            (counts, Counter(name for name in set(names) if name in declared and not self._is_computed(name)))
            for counts, names in ((self._labels, labels), (self._weights, weights))
        ]
        for counts, names in required:
            counts.update(names)

        def end() -> None:
            for counts, names in required:
                counts.subtract(names)

        stack = ExitStack()
        stack.callback(end)
        return stack

    def _is_computed(self, name: str) -> bool:
        if self._transform is None:
            return False
        features = getattr(self._transform, "features", None)
        # A function may fill in missing values; a FeatureEngine lists its outputs.
        return features is None or any(name in feature.outputs() for feature in features)

    def reader(self, source: RetryingSource) -> Callable[[Split], Iterator[pa.RecordBatch]]:
        """A function that reads the records of splits, and raises where one lacks a value."""
        checks = [check for column in self._columns for check in self._checks(column, source.schema)]
        return partial(_read_checked, source, checks) if checks else source.read

    def _checks(self, column: Column, schema: pa.Schema) -> Iterator[_Check]:
        if column.name not in schema.names:
            return
        _, leaf = unnest(schema.field(column.name).type)
        if self._labels[column.name] or self._weights[column.name]:
            message = missing_value("label" if self._labels[column.name] else "weight")
            yield _Check(column.name, lambda array: first_missing(column, array), lambda _: message)
        if isinstance(column, Fixed | Varlen) and is_number(leaf):
            limits = limits_of(arrow_to_torch.plain_type(leaf), getattr(column, "dtype", None))
            if limits is not None:
                yield _limit_check(column.name, limits)
        if isinstance(column, Varlen) and is_weighted(leaf):
            yield _Check(column.name, first_missing_weight, lambda _: MISSING_WEIGHT)
        elif isinstance(column, Fixed) and is_number(leaf):
            yield from _declared(column, schema.field(column.name).type)


class _Check(NamedTuple):
    """How to find a record that cannot be used, and how to describe it."""

    column: str
    find: _Find
    describe: _Describe


def _declared(column: Fixed, type_: pa.DataType) -> Iterator[_Check]:
    """The checks that a `Fixed` implies."""
    levels, leaf = unnest(type_)
    floating = arrow_to_torch.is_floating(leaf)
    whole = not (floating if column.dtype is None else column.dtype.is_floating_point)
    if levels == 1 and not (pa.types.is_fixed_size_list(type_) and type_.list_size == column.length):

        def first_of_other_length(array: pa.Array) -> int | None:
            lengths = arrow_to_torch.peel(array)[0].diff()
            return _first((lengths != column.length) & (lengths != 0))

        yield _Check(
            column.name,
            first_of_other_length,
            lambda record: f"Expected {column.length} values, but there are {len(record[0])}.",
        )
    if whole and column.length > 1 and column.default is None:
        message = missing_in_list(column.length)
        yield _Check(column.name, lambda array: first_missing(column, array), lambda _: message)
    if whole and floating and levels <= 1:
        yield _value_check(column.name, first_inexact, describe_inexact)


def _limit_check(column: str, limits: DtypeRange) -> _Check:
    """The check that a column's dtype holds the values."""
    plain = arrow_to_torch.plain
    return _value_check(
        column,
        lambda values: first_beyond(plain(values), limits),
        lambda values, at: describe_beyond(plain(values)[at].as_py(), limits),
    )


def _value_check(column: str, find: _Find, describe: Callable[[pa.Array, int], str]) -> _Check:
    """A check of single values, in lists of any depth."""

    def describe_first(record: pa.Array) -> str:
        values = record
        while is_list(values.type):
            values = arrow_to_torch.peel(values)[1]
        at = find(values)
        assert at is not None
        return describe(values, at)

    return _Check(column, partial(_first_row, find=find), describe_first)


def _first_row(array: pa.Array, find: _Find) -> int | None:
    """The row of the first value that is found, in lists of any depth."""
    if not is_list(array.type):
        return find(array)
    offsets, values = arrow_to_torch.peel(array)
    at = _first_row(values, find)
    return None if at is None else arrow_to_torch.row_of(offsets, at)


def _read_checked(source: RetryingSource, checks: Sequence[_Check], split: Split) -> Iterator[pa.RecordBatch]:
    at = split.first
    for records in source.read(split):
        missing = [
            (row, number)
            for number, check in enumerate(checks)
            if (row := check.find(records.column(check.column))) is not None
        ]
        if missing:
            row, number = min(missing)
            if row:  # the records before it are valid
                yield records.slice(0, row)
            name, _, describe = checks[number]
            message = describe(records.column(name).slice(row, 1))
            place = source.place_of(split.path, at + row)
            raise DataError(message, path=split.path, place=place, column=name)
        at += len(records)
        yield records


def _missing(array: pa.Array, only_nan: bool) -> Tensor | None:
    array = arrow_to_torch.logical(array)
    if pa.types.is_floating(array.type):
        mask = array.is_null(nan_is_null=True)
        if only_nan and array.null_count:
            mask = pc.and_(mask, array.is_valid())
        return arrow_to_torch.dense(mask.cast(pa.uint8())).view(torch.bool)
    return arrow_to_torch.is_null(array) if array.null_count and not only_nan else None


def _first(mask: Tensor | None) -> int | None:
    if mask is None or not bool(mask.any()):
        return None
    return int(mask.to(torch.uint8).argmax())
