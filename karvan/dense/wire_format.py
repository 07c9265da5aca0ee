"""Dense parameters on the wire: tensors as one array of float32, with their names and shapes in the head.

States, which also have other dtypes and numbers, are one array of bytes: the tree as JSON, followed by its
tensors (`checkpoint/state_tree.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan.checkpoint.state_tree import pack, unpack
from karvan.dense.tensors import Array, dense_tensor
from karvan.wire import Message, RefusedError
from karvan.wire.message import Array as WireArray

# The exceptions that reading an invalid tree may raise.
WRONG = (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError)


def tensors_message(values: Mapping[str, Array], **head: Any) -> Message:
    """Tensors by name, in the form of a message."""
    plain = {name: dense_tensor(name, value, copy=False) for name, value in values.items()}
    flat = torch.cat([tensor.reshape(-1) for tensor in plain.values()]) if plain else torch.empty(0)
    shapes = [[name, list(tensor.shape)] for name, tensor in plain.items()]
    return Message({**head, "tensors": shapes}, [flat.numpy()])


def tensors_of(
    shapes: Sequence[tuple[str, Sequence[int]]], arrays: Sequence[WireArray]
) -> dict[str, WireArray]:
    """The tensors of a message that was checked against its declaration (its call)."""
    flat = arrays[0]
    tensors: dict[str, WireArray] = {}
    at = 0
    for name, shape in shapes:
        size = math.prod(shape)
        tensors[name] = flat[at : at + size].reshape(shape)
        at += size
    return tensors


def state_message(state: Mapping[str, Any], **head: Any) -> Message:
    """A state as a message."""
    return Message(head, [np.frombuffer(pack(state), np.uint8)])


def state_of(arrays: Sequence[WireArray]) -> dict[str, Any]:
    """The state of a message with these arrays; a RefusedError if there is none."""
    try:
        state = unpack(arrays[0].tobytes())
    except (*WRONG, RecursionError) as error:
        raise RefusedError(f"expected a state, got bytes that cannot be read: {error}") from error
    if not isinstance(state, dict) or not _has_tensors(state.get("parameters")):
        raise RefusedError("expected a state of dense parameters, got something else.")
    return state


def _has_tensors(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, Tensor) for value in values.values())
