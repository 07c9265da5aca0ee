"""Trees of state as bytes, for messages between ranks and processes, without pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from karvan.checkpoint.format.safetensors_file import Stored
from karvan.checkpoint.format.state_tree import as_tensor, decode, encode


def pack(state: Any) -> bytes:
    """A tree as bytes: the length of its JSON, its JSON with a list of arrays, and the arrays."""
    tree, arrays = encode(state)
    listed = [[name, array.dtype, list(array.shape), len(array.data)] for name, array in arrays.items()]
    header = json.dumps({"tree": tree, "arrays": listed}).encode()
    header += b" " * (-(len(header) + 8) % 16)
    parts = [array.data.tobytes() for array in arrays.values()]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(data: bytes) -> Any:
    """The tree that `pack` has written."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    content = np.frombuffer(bytearray(data), np.uint8)
    tensors = {}
    for name, dtype, shape, size in header["arrays"]:
        tensors[name] = as_tensor(Stored(dtype, tuple(shape), content[start : start + size])).clone()
        start += size
    return decode(header["tree"], tensors)
