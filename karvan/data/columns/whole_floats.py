"""Integers that were written as floats, as pandas does where one is missing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from karvan.data.errors import DataError

_EXACT_BITS = {16: 11, 32: 24, 64: 53}  # integers up to this many bits are exact as floats


def whole_numbers(array: pa.Array, first_record: int | None = None) -> pa.Array:
    """Floats as int64, with null for NaN. Fractions, and integers that floats round, are a `DataError`."""
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_decimal(array.type):
        return array.cast(pa.int64())
    if (at := first_inexact(array)) is not None:
        place = f"value {at} of the records" if first_record is None else f"record {first_record + at}"
        raise DataError(describe_inexact(array, at), place=place)
    return pc.if_else(array.is_null(nan_is_null=True), None, array).cast(pa.int64())


def first_inexact(array: pa.Array) -> int | None:
    """The first float that is a fraction, or so large that different integers round to it."""
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not types.is_floating(array.type):
        return None
    values = array.to_numpy(zero_copy_only=False)  # null becomes NaN
    with np.errstate(invalid="ignore"):
        exact = (np.abs(values) < 2.0 ** _EXACT_BITS[array.type.bit_width]) & (np.trunc(values) == values)
    if exact.all():
        return None
    wrong = ~exact & ~np.isnan(values)
    return int(wrong.argmax()) if wrong.any() else None


def describe_inexact(array: pa.Array, at: int) -> str:
    """The message for the float that `first_inexact` has found."""
    value = array[at].as_py()
    if not np.isfinite(value) or value != np.trunc(value):
        return f"Expected whole numbers, since an integer dtype is declared, but received {value}."
    type_ = array.type.value_type if types.is_dictionary(array.type) else array.type
    return (
        f"Expected integers below 2**{_EXACT_BITS[type_.bit_width]}, but received {value:.0f}: {type_} rounds"
        " integers of this size, so that different ids become the same. Store them as integers (in pandas "
        "with the type Int64) or as strings where the data is written."
    )
