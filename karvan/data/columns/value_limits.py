"""Values and defaults that the dtype of a column cannot hold: errors, where a conversion would wrap or round.

A conversion by torch makes 7 of 2^32 + 7 in int32, 255 of -1 in uint8, and infinity of 1e300 in float32. The
ids of 64 bits are an exception: unsigned ones keep their bits as int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types

from karvan.data.errors import DataError


class Limits(NamedTuple):
    """The least and the greatest value that a dtype holds."""

    low: float
    high: float
    dtype: torch.dtype


def limits_of(stored: pa.DataType, dtype: torch.dtype | None) -> Limits | None:
    """The limits of a column's dtype, by default that of the type; None if all values of the type fit."""
    if dtype is None:
        dtype = torch.float32 if types.is_floating(stored) else torch.int64
    if dtype.is_floating_point:
        if types.is_floating(stored):
            finite = torch.finfo(dtype)
            # What is larger by less than half of the last bit is rounded to the largest number.
            high = finite.max * (1 + finite.eps / 4)
            return Limits(-high, high, dtype) if stored.bit_width > finite.bits else None
        return Limits(0, 2**63 - 1, dtype) if types.is_uint64(stored) else None
    if types.is_boolean(stored) or dtype is torch.int64:  # of floats, `whole_numbers` takes those below 2^53
        return None
    low, high = integer_limits(dtype)
    if types.is_integer(stored):
        signed, width = types.is_signed_integer(stored), stored.bit_width
        least, greatest = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)
        if low <= least and greatest <= high:
            return None
    return Limits(low, high, dtype)


def integer_limits(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest integer of a dtype."""
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def first_beyond(array: pa.Array, limits: Limits) -> int | None:
    """The first value that a dtype cannot hold; infinity and missing values are no such values."""
    values = array.to_numpy(zero_copy_only=False)  # null becomes NaN
    # A tenth of the time of Arrow's min_max; NaN is passed over.
    if not len(values) or not (np.fmin.reduce(values) < limits.low or np.fmax.reduce(values) > limits.high):
        return None
    with np.errstate(invalid="ignore"):
        beyond = ((values < limits.low) | (values > limits.high)) & ~np.isinf(values.astype(np.float64))
    return int(beyond.argmax()) if beyond.any() else None


def describe_beyond(value: object, limits: Limits) -> str:
    """The message for a value that `first_beyond` has found."""
    advice = "Declare a wider one, such as Fixed(…, dtype=torch.float64)"
    if not limits.dtype.is_floating_point:
        advice = "Declare a wider one, or none for int64"
    return (
        f"Expected values that {limits.dtype} can hold, from {limits.low:.8g} to {limits.high:.8g}, got "
        f"{value}. {advice}."
    )


def require_fits(array: pa.Array, limits: Limits | None) -> None:
    """Raise a DataError for the first value that a dtype cannot hold."""
    if limits is not None and (at := first_beyond(array, limits)) is not None:
        place = f"value {at} of the records"
        raise DataError(describe_beyond(array[at].as_py(), limits), place=place)


def check_defaults(
    defaults: Sequence[float] | None, stored: pa.DataType, dtype: torch.dtype | None, column: str
) -> None:
    """Raise a DataError for a default that becomes another number in the column."""
    floating = types.is_floating(stored) if dtype is None else dtype.is_floating_point
    for default in defaults or ():
        if floating:
            highest = torch.finfo(dtype or torch.float32).max
            if math.isfinite(default) and abs(default) > highest:
                raise DataError(f"The default {default} is beyond {dtype or torch.float32}.", column=column)
            continue
        low, high = integer_limits(dtype or (torch.bool if types.is_boolean(stored) else torch.int64))
        if dtype in (None, torch.int64) and not types.is_boolean(stored):
            high = 2**64 - 1  # an unsigned id, of which the bits are kept
        if not math.isfinite(default) or default != int(default) or not low <= default <= high:
            kind = dtype or (torch.bool if types.is_boolean(stored) else torch.int64)
            raise DataError(
                f"The default {default} does not fit the column: its type is {stored}, which becomes "
                f"{kind}. For numbers with a fraction, declare Fixed('{column}', dtype=torch.float32, "
                f"default={default}).",
                column=column,
            )


# Integers that were written as floats, as pandas does where one is missing.


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
