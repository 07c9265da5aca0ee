"""Batches as messages: tensors of any dtype, ragged ones, and plain values, to arrays and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan.ragged import Batch, IdsReference, NestedRagged, OptionalRagged, OptionalText, Padded, Ragged
from karvan.wire import Array, Message, RefusedError

# The first kind that matches an entry is taken, so subclasses come before their bases.
_PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "optional": (OptionalRagged, ("values", "offsets", "weights")),
    "optional text": (OptionalText, ("values", "inner", "outer")),
    "ragged": (Ragged, ("values", "offsets", "weights")),
    "nested": (NestedRagged, ("values", "inner", "outer")),
    "padded": (Padded, ("values", "mask")),
}
_AS_BITS = {torch.bfloat16: "bfloat16"}  # dtypes that NumPy does not have


def pack(batch: Mapping[str, Any]) -> Message:
    """A batch as a message; entries that are not tensors must be values that JSON can express."""
    entries: dict[str, Any] = {}
    arrays: list[Array] = []
    for name, entry in batch.items():
        kind = next((kind for kind, (type_, _) in _PARTS.items() if isinstance(entry, type_)), "tensor")
        if isinstance(entry, IdsReference):
            entries[name] = ["reference", [entry.worker, entry.name, entry.rows]]
            continue
        if kind == "tensor" and not isinstance(entry, Tensor):
            entries[name] = ["plain", entry]
            continue
        parts = [entry] if kind == "tensor" else [getattr(entry, part) for part in _PARTS[kind][1]]
        entries[name] = [kind, [None if part is None else _put(part, arrays) for part in parts]]
    return Message({"batch": entries}, arrays)


def unpack(entries: Mapping[str, Any], arrays: Sequence[Array]) -> Batch:
    """The batch that was packed; a RefusedError if the message is not a batch."""
    batch: dict[str, Any] = {}
    try:
        for name, (kind, content) in entries.items():
            if kind == "plain":
                batch[name] = content
                continue
            if kind == "reference":
                batch[name] = IdsReference(*content)
                continue
            parts = [None if slot is None else _take(slot, arrays) for slot in content]
            batch[name] = parts[0] if kind == "tensor" else _PARTS[kind][0](*parts)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise RefusedError(f"expected a batch, got a message that is not one: {error}") from error
    return Batch(batch)


def _put(tensor: Tensor, arrays: list[Array]) -> list[Any]:
    bits = _AS_BITS.get(tensor.dtype)
    plain = tensor.detach().cpu()
    arrays.append(plain.view(torch.int16).numpy().view(np.uint16) if bits else plain.numpy())
    return [len(arrays) - 1, bits or ""]


def _take(slot: Sequence[Any], arrays: Sequence[Array]) -> Tensor:
    number, bits = slot
    # A copy: arrays from the wire are read-only, and a model may write to its inputs.
    array = arrays[number].copy()
    if not bits:
        return torch.from_numpy(array)
    dtype = next(dtype for dtype, name in _AS_BITS.items() if name == bits)
    return torch.from_numpy(array.view(np.int16)).view(dtype)
