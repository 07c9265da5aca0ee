"""Messages: a head, which is JSON, and arrays, which are sent as Arrow buffers without a copy.

On a Flight stream a message is one chunk per array, or one without data if it has no array; the head is the
metadata of the first chunk. It lists the arrays that follow, so that a reader can refuse anything else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import TypeVar

from karvan.errors import RefusedError

Array: TypeAlias = NDArray[Any]

SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES = ("bool", *_INTEGERS, "float16", "float32", "float64")
MOST_BYTES = 2**30  # of a message
LARGE = 2**24  # bytes; a larger answer is announced, since sending it may take a while
_MOST_HEAD = 2**24
_MOST_ARRAYS = 1024
_MOST_DIMENSIONS = 32


class Fielded(Protocol):
    """An object with fields; `karvan.wire.schema.Head` is one."""

    def as_json(self) -> dict[str, Any]:
        """The object that is sent."""


Sent: TypeAlias = Fielded | Mapping[str, Any]
H = TypeVar("H", default=dict[str, Any])


class Message(NamedTuple, Generic[H]):
    """A call or an answer; its head is a mapping, or a `karvan.wire.schema.Head`."""

    head: H
    arrays: Sequence[Array] = ()

    @property
    def bytes(self) -> int:
        """The size of its arrays."""
        return sum(array.nbytes for array in self.arrays)


class Packed(NamedTuple):
    """A message that has been checked and encoded."""

    head: str  # JSON
    arrays: Sequence[Array]


def pack(message: Message[Any], most: int = MOST_BYTES) -> Packed:
    """A message ready to be written; a ValueError or TypeError if it cannot be."""
    if len(message.arrays) > _MOST_ARRAYS or message.bytes > most:
        raise ValueError(
            f"A message expects up to {_MOST_ARRAYS} arrays and {most} bytes, "
            f"got {len(message.arrays)} and {message.bytes}."
        )
    described = []
    for array in message.arrays:
        if str(array.dtype) not in DTYPES or array.ndim > _MOST_DIMENSIONS:
            raise TypeError(
                f"A message expects arrays of {', '.join(DTYPES)} with up to {_MOST_DIMENSIONS} dimensions, "
                f"got {array.dtype} with {array.ndim}."
            )
        described.append([str(array.dtype), list(array.shape)])
    head = message.head if isinstance(message.head, Mapping) else message.head.as_json()
    text = json.dumps({**head, "arrays": described}, separators=(",", ":"), default=_as_json)
    return Packed(text, message.arrays)


def _as_json(value: Any) -> dict[str, Any]:
    if not hasattr(value, "as_json"):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")  # as json says
    fields: dict[str, Any] = value.as_json()
    return fields


def write(writer: Any, packed: Packed, **numbers: int) -> None:
    """Write a message to a Flight stream; numbers are added to its head."""
    more = "".join(f',"{name}":{value}' for name, value in numbers.items())
    head = f"{packed.head[:-1]}{more}}}".encode()
    if not packed.arrays:
        writer.write_metadata(head)
        return
    for number, array in enumerate(packed.arrays):
        batch = _wrapped(array)
        if number == 0:
            writer.write_with_metadata(batch, head)
        else:
            writer.write_batch(batch)


def read(read_chunk: Callable[[], Any], most: int = MOST_BYTES) -> Message:
    """The next message of a Flight stream; StopIteration at its end, RefusedError if it is malformed."""
    chunk = read_chunk()
    head = _head(chunk.app_metadata)
    expected = _expected(head, most)
    arrays = []
    for number, (dtype, shape) in enumerate(expected):
        if number:
            chunk = read_chunk()
            if chunk.app_metadata is not None:
                raise RefusedError("expected the next array of a message, got a new message.")
        arrays.append(_unwrapped(chunk.data, dtype, shape))
    if not expected and chunk.data is not None:
        raise RefusedError("expected a message without arrays, got data.")
    return Message(head, arrays)


def _wrapped(array: Array) -> pa.RecordBatch:
    flat = np.ascontiguousarray(array)
    column = pa.Array.from_buffers(
        pa.uint8(), flat.nbytes, [None, pa.py_buffer(flat.reshape(-1).view(np.uint8))]
    )
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def _unwrapped(batch: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if batch is None or not batch.schema.equals(SCHEMA):
        received = "none" if batch is None else str(batch.schema).strip()
        raise RefusedError(f"expected one column of bytes for an array, got {received[:200]}.")
    count = math.prod(shape)
    size = count * dtype.itemsize
    column = batch.column(0)
    try:
        column.validate()  # the buffers must be as large as the column says
    except pa.ArrowInvalid as error:
        raise RefusedError(f"expected an array, got one that is damaged: {error}") from error
    if batch.num_rows != size or column.null_count:
        raise RefusedError(f"expected {size} bytes for an array {dtype} {shape}, got {batch.num_rows}.")
    if size == 0:
        return np.empty(shape, dtype)
    array = np.frombuffer(column.buffers()[1], dtype, count, offset=column.offset).reshape(shape)
    return array if array.ctypes.data % dtype.itemsize == 0 else array.copy()


def _head(metadata: Any) -> dict[str, Any]:
    if metadata is None or metadata.size > _MOST_HEAD:
        received = "none" if metadata is None else f"one of {metadata.size} bytes"
        raise RefusedError(f"expected a message with a head of up to {_MOST_HEAD} bytes, got {received}.")
    try:
        head = json.loads(metadata.to_pybytes())
    except (ValueError, RecursionError) as error:
        raise RefusedError("expected a head in JSON, got something else.") from error
    if not isinstance(head, dict):
        raise RefusedError(f"expected a head that is an object, got {type(head).__name__}.")
    return head


def _expected(head: Mapping[str, Any], most: int) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    described = head.get("arrays")
    if not isinstance(described, list) or len(described) > _MOST_ARRAYS:
        raise RefusedError(f"expected a list of up to {_MOST_ARRAYS} arrays in the head.")
    expected = []
    for description in described:
        match description:
            case [str(name), [*shape]] if name in DTYPES and _is_shape(shape):
                expected.append((np.dtype(name), tuple(shape)))
            case _:
                raise RefusedError(
                    f"expected a dtype and a shape for an array, got {str(description)[:100]}."
                )
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in expected)
    if size > most:
        raise RefusedError(f"expected a message of up to {most} bytes, got one of {size}.")
    return expected


def _is_shape(shape: Sequence[Any]) -> bool:
    if len(shape) > _MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        return False
    return bool(math.prod(max(size, 1) for size in shape) < 2**48)  # also where another size is 0
