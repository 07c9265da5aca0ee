"""State trees as JSON and named tensors, without pickle.

Dicts with text keys, lists, text, numbers, booleans and None are the same in JSON. The rest is an object
with one key: `{"$tensor": name}`, `{"$tuple": […]}`, `{"$dict": [[key, value], …]}` for dicts with other
keys or ones that start with a dollar sign, `{"$float": "nan"}` for floats that JSON cannot represent.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan.checkpoint.safetensors_file import DTYPES, ITEM_BYTES, Stored

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def encode(state: Any) -> tuple[Any, dict[str, Stored]]:
    """The tree in JSON's terms, and copies of its tensors by name, the widest elements first."""
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors)
    copies = {name: _copy(name, tensor) for name, tensor in tensors.items()}
    # Every array then begins at a multiple of its element's size.
    order = sorted(copies, key=lambda name: -ITEM_BYTES[copies[name].dtype])
    return tree, {name: copies[name] for name in order}


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": _float_text(float(value))}
    if isinstance(value, Tensor):
        name = path or "tensor"
        while name in tensors or name == "__metadata__":
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return _encode_dict(value, path, tensors)
    if isinstance(value, list | tuple):
        items = [_encode(item, _join(path, index), tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise TypeError(
        f"State at '{path}': expected a dict, list, tuple, str, int, float, bool, None or Tensor, "
        f"got {type(value).__module__}.{type(value).__qualname__}."
    )


def _float_text(value: float) -> str:
    """inf, -inf and the default nan by name; other NaNs by their bits."""
    bits = struct.pack(">d", value)
    return str(value) if bits == struct.pack(">d", float(str(value))) else f"0x{bits.hex()}"


def _encode_dict(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    for key in value:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise TypeError(f"State at '{path}': expected keys of str or int, got {key!r}.")
    items = [(key, _encode(item, _join(path, key), tensors)) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
        return {str(key): item for key, item in items}
    return {"$dict": [[key, item] for key, item in items]}


def _join(path: str, key: str | int) -> str:
    return f"{path}/{key}" if path else str(key)


def _copy(name: str, tensor: Tensor) -> Stored:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"State at '{name}': expected a dense tensor with values, got {tensor.type()}.")
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"State at '{name}': expected a dtype out of {names}, got {tensor.dtype}.")
    plain = tensor.detach().resolve_conj().resolve_neg()
    copy = plain.to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()
    data = copy.reshape(-1).view(torch.uint8).numpy()
    return Stored(DTYPES[tensor.dtype], tuple(tensor.shape), data)


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `encode` was called with; a KeyError or ValueError says what the tree lacks."""
    if isinstance(tree, list):
        return [decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        match tree:
            case {"$tensor": str(name)}:
                return tensors[name]
            case {"$tuple": list(items)}:
                return tuple(decode(item, tensors) for item in items)
            case {"$float": str(text)}:
                return struct.unpack(">d", bytes.fromhex(text[2:]))[0] if text[:2] == "0x" else float(text)
            case {"$dict": list(items)}:
                return {key: decode(item, tensors) for key, item in items}
    for key in tree:
        if key.startswith("$"):
            raise ValueError(f"expected a known kind of value, got '{key}'")
    return {key: decode(item, tensors) for key, item in tree.items()}


def tensor_names(tree: Any) -> Iterable[str]:
    """The names of all tensors that a tree refers to."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensor_names(item)
    elif isinstance(tree, dict):
        if len(tree) == 1 and isinstance(tree.get("$tensor"), str):
            yield tree["$tensor"]
        else:
            yield from tensor_names(list(tree.values()))


def as_tensor(array: Stored) -> Tensor:
    """The tensor that was stored."""
    if not len(array.data):
        return torch.empty(array.shape, dtype=_TORCH[array.dtype])
    data = array.data
    if data.ctypes.data % 16:  # torch needs aligned elements; numpy accepts any address
        data = np.copy(data)
    return torch.from_numpy(data).view(_TORCH[array.dtype]).reshape(array.shape)


# Trees of state as bytes, for messages between ranks and processes, without pickle.


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
