"""Arrow arrays as tensors, without copies where memory layouts agree and without loops over rows."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from karvan import ids
from karvan.data.columns import Number, is_list
from karvan.data.errors import DataError
from karvan.ragged import Ragged


def numbers(array: pa.Array, default: Number = 0) -> Tensor:
    """int64, float32 or bool by type, with `default` for nulls."""
    return number_reader(array.type, default)(array)


def number_reader(type_: pa.DataType, default: Number = 0) -> Callable[[pa.Array], Tensor]:
    """What `numbers` does for one type, decided once: a batch may have a hundred columns."""
    stored, prepare = _stored(type_)
    filler = _scalar(default, stored)
    wanted = torch.float32 if types.is_floating(stored) else torch.int64
    reinterpret = types.is_uint64(stored)
    as_is = stored in (pa.int64(), pa.float32())

    def read(array: pa.Array) -> Tensor:
        if prepare is not None:
            array = prepare(array)
        if array.null_count:
            array = array.fill_null(filler)
        if as_is:
            return dense(array)
        if types.is_boolean(stored):
            return dense(array.cast(pa.uint8())).view(torch.bool)
        return dense(array).view(wanted) if reinterpret else dense(array).to(wanted)

    return read


def _stored(type_: pa.DataType) -> tuple[pa.DataType, Callable[[pa.Array], pa.Array] | None]:
    """The plain type that stands for a type, and how to get there."""
    if types.is_timestamp(type_):
        return pa.int64(), lambda array: array.cast(pa.timestamp("us"), safe=False).view(pa.int64())
    if types.is_date(type_):
        return pa.int32(), lambda array: array.cast(pa.date32()).view(pa.int32())
    if types.is_decimal(type_):
        return pa.float64(), lambda array: array.cast(pa.float64())
    return type_, None


def dense(array: pa.Array) -> Tensor:
    """The same memory as a tensor; the array must not have nulls."""
    tensor: Tensor = from_dlpack(array)
    return tensor


def texts(array: pa.Array) -> Ragged:
    """Strings as rows of bytes; a null is an empty row."""
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    type_ = array.type
    if types.is_string_view(type_) or types.is_binary_view(type_):
        array = array.cast(pa.large_binary())
    elif types.is_fixed_size_binary(type_):
        array = array.cast(pa.binary())
    if array.null_count:
        array = array.fill_null(b"" if "binary" in str(array.type) else "")
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
    """The ids of strings; those of a dictionary are hashed once each."""
    if types.is_dictionary(array.type) and len(array.dictionary) < len(array):
        words = array.dictionary
        known = hashed(words, hash_, bucket)
        # A null, of the indices or of the dictionary, is the empty string: one more word at the end.
        empty = hashed(pa.array([""]), hash_, bucket)
        places = numbers(array.indices, len(words))
        return torch.cat([known, empty])[places]
    return ids.hash_strings(texts(array), hash_, bucket)


def weights(array: pa.Array) -> Tensor:
    """float32, with 1 for nulls."""
    return numbers(array, 1).to(torch.float32)


def peel(array: pa.Array) -> tuple[Tensor, pa.Array]:
    """The offsets of a list array's rows, from 0, and the values they point to; a null is an empty row."""
    if types.is_map(array.type):
        # A map is stored as a list of structs, which is easier to take apart.
        pair = pa.struct([array.type.key_field.with_nullable(True), array.type.item_field])
        array = array.cast(pa.list_(pair))
    if types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    if len(array) == 0:
        return torch.zeros(1, dtype=torch.int64), array.values.slice(0, 0)
    if array.null_count:
        offsets = torch.zeros(len(array) + 1, dtype=torch.int64)
        lengths = numbers(pc.list_value_length(array))
        torch.cumsum(lengths, 0, out=offsets[1:])
        return offsets, array.flatten()
    offsets = dense(array.offsets)
    first, end = int(offsets[0]), int(offsets[-1])
    return _from_zero(offsets, first), array.values.slice(first, end - first)


def of_length(array: pa.Array, length: int, defaults: list[Number], column: str) -> Tensor:
    """Lists that all have `length` values, as a matrix; nulls and empty lists become the defaults."""
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
    filled = torch.tensor(defaults)
    values = numbers(leaf, 0).reshape(-1, length)
    if leaf.null_count:
        missing = dense(leaf.is_null().cast(pa.uint8())).view(torch.bool).reshape(-1, length)
        values = torch.where(missing, filled.to(values.dtype), values)
    if bool(present.all()):
        return values
    out = filled.to(values.dtype).repeat(len(array), 1)
    out[present] = values
    return out


def _scalar(default: Number, type_: pa.DataType) -> pa.Scalar:
    if types.is_integer(type_):
        default = int(default)
        if types.is_unsigned_integer(type_) and default < 0:
            default += 1 << type_.bit_width  # ids are bit patterns
    elif types.is_boolean(type_):
        default = bool(default)
    return pa.scalar(default, type_)


def _from_zero(offsets: Tensor, first: int) -> Tensor:
    moved = offsets.to(torch.int64)
    return moved - first if first else moved
