"""Arrow arrays as tensors, without copies where memory layouts match and without loops over rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from karvan import ids
from karvan.data.columns.declarations import Number, is_list
from karvan.data.errors import DataError
from karvan.ragged import OptionalRagged, Ragged

# Values and defaults that the dtype of a column cannot hold: errors, where a conversion would wrap or round.
#
# A conversion by torch makes 7 of 2^32 + 7 in int32, 255 of -1 in uint8, and infinity of 1e300 in float32.
# The ids of 64 bits are an exception: unsigned ones keep their bits as int64.


class DtypeRange(NamedTuple):
    """The least and the greatest value that a dtype holds."""

    low: float
    high: float
    dtype: torch.dtype


def limits_of(stored: pa.DataType, dtype: torch.dtype | None) -> DtypeRange | None:
    """The limits of a column's dtype, by default that of the type; None if all values of the type fit."""
    if dtype is None:
        dtype = torch.float32 if types.is_floating(stored) else torch.int64
    if dtype.is_floating_point:
        if types.is_floating(stored):
            finite = torch.finfo(dtype)
            # What is larger by less than half of the last bit is rounded to the largest number.
            high = finite.max * (1 + finite.eps / 4)
            return DtypeRange(-high, high, dtype) if stored.bit_width > finite.bits else None
        return DtypeRange(0, 2**63 - 1, dtype) if types.is_uint64(stored) else None
    if types.is_boolean(stored) or dtype is torch.int64:  # of floats, `whole_numbers` takes those below 2^53
        return None
    low, high = integer_limits(dtype)
    if types.is_integer(stored):
        signed, width = types.is_signed_integer(stored), stored.bit_width
        least, greatest = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if signed else (0, 2**width - 1)
        if low <= least and greatest <= high:
            return None
    return DtypeRange(low, high, dtype)


def integer_limits(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest integer of a dtype."""
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def first_beyond(array: pa.Array, limits: DtypeRange) -> int | None:
    """The first value that a dtype cannot hold; infinity and missing values are no such values."""
    values = array.to_numpy(zero_copy_only=False)  # null becomes NaN
    # A tenth of the time of Arrow's min_max; NaN is passed over.
    if not len(values) or not (np.fmin.reduce(values) < limits.low or np.fmax.reduce(values) > limits.high):
        return None
    with np.errstate(invalid="ignore"):
        beyond = ((values < limits.low) | (values > limits.high)) & ~np.isinf(values.astype(np.float64))
    return int(beyond.argmax()) if beyond.any() else None


def describe_beyond(value: object, limits: DtypeRange) -> str:
    """The message for a value that `first_beyond` has found."""
    advice = "Declare a wider one, such as Fixed(…, dtype=torch.float64)"
    if not limits.dtype.is_floating_point:
        advice = "Declare a wider one, or none for int64"
    return (
        f"Expected values that {limits.dtype} can hold, from {limits.low:.8g} to {limits.high:.8g}, got "
        f"{value}. {advice}."
    )


def require_fits(array: pa.Array, limits: DtypeRange | None) -> None:
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


# Arrays as tensors.


def numbers(array: pa.Array, default: Number = 0) -> Tensor:
    """int64, float32 or bool by type, with `default` for nulls."""
    tensor = number_reader(array.type, default)(array)
    assert isinstance(tensor, Tensor)
    return tensor


def number_reader(
    type_: pa.DataType, default: Number | None, dtype: torch.dtype | None = None
) -> Callable[[pa.Array], Tensor | OptionalRagged]:
    """A function that converts arrays of one type to int64, float32 or bool, or to a dtype.

    It is made once, not for every batch. Nulls become the default. Without one they are NaN in floats and
    missing values in other types.
    """
    if dtype is not None and dtype.is_floating_point:
        return _float_reader(type_, math.nan if default is None else float(default), dtype)
    if dtype is not None:
        return _integer_reader(type_, default, dtype)
    stored, prepare = _stored(type_)
    if default is None and types.is_floating(stored):
        default = math.nan
    wide = pa.int64() if types.is_integer(stored) and not types.is_uint64(stored) else stored
    filler = None if default is None else _scalar(default, wide)
    dtype = torch.float32 if types.is_floating(stored) else torch.int64
    reinterpret = types.is_uint64(stored)
    as_is = stored in (pa.int64(), pa.float32())
    limits = limits_of(stored, None)

    def read(array: pa.Array) -> Tensor | OptionalRagged:
        if prepare is not None:
            array = prepare(array)
        if array.null_count:
            if filler is None:
                return OptionalRagged(convert(array.drop_null()), valid_offsets(array))
            array = (array if wide == array.type else array.cast(wide)).fill_null(filler)
        require_fits(array, limits)
        return dense(array) if as_is else convert(array)

    def convert(array: pa.Array) -> Tensor:
        if as_is:
            return dense(array)
        if types.is_boolean(stored):
            return dense(array.cast(pa.uint8())).view(torch.bool)
        return dense(array).view(dtype) if reinterpret else dense(array).to(dtype)

    return read


def _integer_reader(
    type_: pa.DataType, default: Number | None, dtype: torch.dtype
) -> Callable[[pa.Array], Tensor | OptionalRagged]:
    from_floats = is_floating(type_)
    plain = number_reader(pa.int64() if from_floats else type_, default)
    stored, prepare = _stored(type_)
    limits = limits_of(stored, dtype)

    def read(array: pa.Array) -> Tensor | OptionalRagged:
        require_fits(array if prepare is None or limits is None else prepare(array), limits)
        entry = plain(whole_numbers(array) if from_floats else array)
        if isinstance(entry, Tensor):
            return entry.to(dtype)
        return OptionalRagged(entry.values.to(dtype), entry.offsets)

    return read


def _float_reader(type_: pa.DataType, default: float, dtype: torch.dtype) -> Callable[[pa.Array], Tensor]:
    stored, prepare = _stored(type_)
    exact = types.is_float64(stored) and dtype == torch.float64  # not through float32
    limits = limits_of(stored, dtype)

    def read(array: pa.Array) -> Tensor:
        array = array if prepare is None else prepare(array)
        require_fits(array, limits)
        if exact:
            return dense(array.fill_null(default) if array.null_count else array)
        values = numbers(array).to(dtype)
        return torch.where(is_null(array), default, values) if array.null_count else values

    return read


def _stored(type_: pa.DataType) -> tuple[pa.DataType, Callable[[pa.Array], pa.Array] | None]:
    """The plain type that represents a type, and the conversion to it."""
    if types.is_timestamp(type_):
        return pa.int64(), lambda array: array.cast(pa.timestamp("us"), safe=False).view(pa.int64())
    if types.is_time(type_):
        return pa.int64(), lambda array: array.cast(pa.time64("us"), safe=False).view(pa.int64())
    if types.is_duration(type_):
        return pa.int64(), lambda array: array.cast(pa.duration("us"), safe=False).view(pa.int64())
    if types.is_date(type_):
        return pa.int32(), lambda array: array.cast(pa.date32()).view(pa.int32())
    if types.is_decimal(type_):
        return pa.float64(), lambda array: array.cast(pa.float64())
    if types.is_dictionary(type_):
        stored, prepare = _stored(type_.value_type)
        if prepare is None:
            return stored, lambda array: array.dictionary_decode()
        return stored, lambda array: prepare(array.dictionary_decode())
    return type_, None


def plain(array: pa.Array) -> pa.Array:
    """The numbers of an array in the plain type that represents its type."""
    _, prepare = _stored(array.type)
    return array if prepare is None else prepare(array)


def plain_type(type_: pa.DataType) -> pa.DataType:
    """The plain type that represents a type."""
    return _stored(type_)[0]


def is_floating(type_: pa.DataType) -> bool:
    """Whether values become floats, in which NaN is a missing value."""
    return bool(types.is_floating(_stored(type_)[0]))


def dense(array: pa.Array) -> Tensor:
    """The same memory as a tensor; the array must not have nulls."""
    tensor: Tensor = from_dlpack(array)
    return tensor


def is_null(array: pa.Array) -> Tensor:
    """Which values are null."""
    return dense(array.is_null().cast(pa.uint8())).view(torch.bool)


def valid_offsets(array: pa.Array) -> Tensor:
    """The offsets of rows of one value each, or none where it is null."""
    if not array.null_count:
        return torch.arange(len(array) + 1)
    return _offsets_of(~is_null(array))


def _offsets_of(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def row_of(offsets: Tensor, at: int) -> int:
    """The row that has a value."""
    return int(torch.searchsorted(offsets, at, right=True)) - 1


def drop_null(offsets: Tensor, array: pa.Array) -> tuple[Tensor, pa.Array]:
    """Rows without their null values: the new offsets, and the values that remain."""
    if not array.null_count:
        return offsets, array
    return valid_offsets(array)[offsets], array.drop_null()


def logical(array: pa.Array) -> pa.Array:
    """The same array in a type whose nulls can be counted and dropped."""
    if types.is_dictionary(array.type) and array.dictionary.null_count:
        return decoded(array)
    return _without_views(array) if array.null_count else array  # Arrow cannot filter views


def _without_views(array: pa.Array) -> pa.Array:
    """The same strings in a type of which Arrow can take and filter."""
    is_view = types.is_string_view(array.type) or types.is_binary_view(array.type)  # as in polars
    return array.cast(pa.large_binary()) if is_view else array


def decoded(array: pa.DictionaryArray) -> pa.Array:
    """The decoded values of a dictionary array."""
    words = _without_views(array.dictionary)
    if words is not array.dictionary:
        array = pa.DictionaryArray.from_arrays(array.indices, words)
    return array.dictionary_decode()


def texts(array: pa.Array) -> Ragged:
    """Strings as rows of bytes; the array must not have nulls."""
    array = _without_views(decoded(array) if types.is_dictionary(array.type) else array)
    if types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    if len(array) == 0:
        return Ragged(torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    _, bounds, data = array.buffers()
    width = pa.int64() if large else pa.int32()
    offsets = dense(pa.Array.from_buffers(width, len(array) + 1, [None, bounds], offset=array.offset))
    first, end = int(offsets[0]), int(offsets[-1])
    if data is None or end == first:
        values = torch.empty(0, dtype=torch.uint8)
    else:
        values = dense(pa.Array.from_buffers(pa.uint8(), end - first, [None, data], offset=first))
    return Ragged(values, _from_zero(offsets, first))


def hashed(array: pa.Array, hash_: str, bucket: int | None) -> Tensor:
    """The ids of strings, none of which is null; those of a dictionary are hashed once each."""
    if types.is_dictionary(array.type) and len(array.dictionary) < len(array):
        dictionary_ids = hashed(array.dictionary, hash_, bucket)
        return dictionary_ids[numbers(array.indices)]
    return ids.hash_strings(texts(array), hash_, bucket)


def peel(array: pa.Array) -> tuple[Tensor, pa.Array]:
    """The offsets of a list array's rows, from 0, and the values they point to; a null is an empty row."""
    if types.is_map(array.type):
        # A map is stored as a list of structs, which is easier to unpack.
        pair = pa.struct([array.type.key_field.with_nullable(True), array.type.item_field])
        array = array.cast(pa.list_(pair))
    if types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    if len(array) == 0:
        return torch.zeros(1, dtype=torch.int64), array.values.slice(0, 0)
    if array.null_count:
        return _offsets_of(numbers(pc.list_value_length(array))), array.flatten()
    offsets = dense(array.offsets)
    first, end = int(offsets[0]), int(offsets[-1])
    return _from_zero(offsets, first), array.values.slice(first, end - first)


def of_length(array: pa.Array, length: int, column: str) -> tuple[pa.Array, Tensor]:
    """The values of lists that have `length` values each, or none, and which of them have values."""
    if not is_list(array.type):
        raise DataError(f"Expected lists of {length} values, but the type is {array.type}.", column=column)
    offsets, leaf = peel(array)
    lengths = offsets[1:] - offsets[:-1]
    present = lengths > 0
    wrong = present & (lengths != length)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise DataError(
            f"Expected {length} values in each row, but row {row} of the batch has {int(lengths[row])}.",
            column=column,
        )
    return leaf, present


def _scalar(default: Number, type_: pa.DataType) -> pa.Scalar:
    if types.is_integer(type_):
        default = int(default)
        if types.is_unsigned_integer(type_) and default < 0:
            default += 1 << type_.bit_width  # ids are bit patterns
    elif types.is_boolean(type_):
        default = bool(default)
    return pa.scalar(default, type_)


def _from_zero(offsets: Tensor, first: int) -> Tensor:
    wide = offsets.to(torch.int64)
    return wide - first if first else wide
