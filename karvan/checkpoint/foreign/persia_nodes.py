"""The rows in a file of PERSIA, `replica_0_shard_0.emb`: a linked list in an array.

All numbers are little-endian. The list:

    count u64, first u32, last u32, free u32, end u32      how many entries, and links
    nodes u32                                              how many nodes follow, as many as may ever be used

A node, of 9 bytes if it is free:

    next u32, previous u32, used u8
    floats u32, floats x f32, dim u64, id u64              if used is 1

The first `dim` floats are the vector, the others optimizer state. The links are the order of use, which has
no meaning here: nodes are read in the order of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from karvan.checkpoint.errors import DamagedCheckpointError
from karvan.checkpoint.foreign.contents import PIECE_BYTES, Advance
from karvan.checkpoint.format.safetensors_file import unread_error

_LIST = struct.Struct("<QIIIII")
_FREE = 9  # bytes of a free node
_MOST_FLOATS = 1 << 20  # of an entry; more is a sign of damage
_RUN = 16  # nodes of one kind in a row, from which on they are found together

Entries = NDArray[Any]  # with the fields of `_entry`


def read_entries(path: Path, advance: Advance, piece: int = PIECE_BYTES) -> Iterator[Entries]:
    """The entries of a file in pieces; those of a piece have equally many floats."""
    try:
        with path.open("rb") as file:
            head = file.read(_LIST.size)
            if len(head) < _LIST.size:
                raise _ends_early(path, "the head of a list")
            left = _LIST.unpack(head)[-1]
            advance(len(head))
            rest = b""
            while left:
                data = file.read(piece)
                if not data:
                    raise _ends_early(path, f"{left:,} more nodes")
                advance(len(data))
                rest += data
                offsets, used, nodes = _scan(path, rest, left)
                left -= nodes
                buffer = np.frombuffer(rest, np.uint8)
                for floats, at in offsets.items():
                    yield _take(buffer, np.array(at, np.int64), floats)
                rest = rest[used:]
            if rest or file.read(1):
                raise DamagedCheckpointError.mismatch(
                    path, "the end of the file after its nodes", "more bytes"
                )
    except OSError as error:
        raise unread_error(path, error) from error


def entry_count(path: Path) -> int:
    """How many entries the list says that it has."""
    try:
        with path.open("rb") as file:
            head = file.read(_LIST.size)
    except OSError as error:
        raise unread_error(path, error) from error
    if len(head) < _LIST.size:
        raise _ends_early(path, "the head of a list")
    return int(_LIST.unpack(head)[0])


def _scan(path: Path, data: bytes, left: int) -> tuple[dict[int, list[int]], int, int]:
    """The offsets of whole used nodes by their number of floats, the bytes of all whole nodes, their number.

    Lengths vary, so that a node's place depends on all before it. Nodes mostly come in runs of one length:
    after a run, as many of the same length are tried at once.
    """
    offsets: dict[int, list[int]] = {}
    at = nodes = run = 0
    last = -1  # the number of floats of the last node; -1 for a free one
    size = len(data)
    while nodes < left and at + _FREE <= size:
        used = data[at + 8]
        if used > 1:
            raise DamagedCheckpointError.mismatch(path, "a node that is used or free (1 or 0)", used)
        floats = -1
        if used:
            if at + _FREE + 4 > size:
                break
            floats = int.from_bytes(data[at + 9 : at + 13], "little")
            if not 0 < floats <= _MOST_FLOATS:
                raise DamagedCheckpointError.mismatch(path, "an entry with floats", f"{floats:,} of them")
        length = _FREE if floats < 0 else 29 + 4 * floats
        if at + length > size:
            break
        run = run + 1 if floats == last else 1
        last = floats
        count = 1
        if run >= _RUN:
            most = min(left - nodes, (size - at) // length, 4 * run)
            count = _same(data, at, length, most, floats)
            run += count - 1
        if floats > 0:
            offsets.setdefault(floats, []).extend(range(at, at + count * length, length))
        at += count * length
        nodes += count
    return offsets, at, nodes


def _same(data: bytes, at: int, length: int, most: int, floats: int) -> int:
    """How many nodes from `at` on have this length, at most so many; at least one."""
    used = np.ndarray((most,), np.uint8, data, at + 8, (length,))
    same = used == (floats > 0)
    if floats > 0:
        counts = np.ndarray((most, 4), np.uint8, data, at + 9, (length, 1))
        same &= (counts == np.frombuffer(struct.pack("<I", floats), np.uint8)).all(axis=1)
    return most if same.all() else int(same.argmin())


def _take(buffer: NDArray[np.uint8], offsets: NDArray[np.int64], floats: int) -> Entries:
    layout = _entry(floats)
    return sliding_window_view(buffer, layout.itemsize)[offsets].view(layout).reshape(-1)


def _entry(floats: int) -> np.dtype[np.void]:
    """A used node."""
    return np.dtype(
        [
            ("next", "<u4"),
            ("previous", "<u4"),
            ("used", "u1"),
            ("floats", "<u4"),
            ("values", "<f4", (floats,)),
            ("dim", "<u8"),
            ("id", "<u8"),
        ]
    )


def _ends_early(path: Path, expected: str) -> DamagedCheckpointError:
    error = DamagedCheckpointError.mismatch(path, expected, "the end of the file")
    assert isinstance(error, DamagedCheckpointError)
    return error
