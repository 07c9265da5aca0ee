"""Dense parameters on the wire: tensors as one array of float32, with their names and shapes in the head.

States, which also have other dtypes and numbers, are one array of bytes: the tree as JSON, followed by its
tensors (`checkpoint/state_tree.py`). torch's optimizers are plain values (`describe`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from karvan.checkpoint.state_tree import pack, unpack
from karvan.dense.steps import Array, dense_tensor
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


Description: TypeAlias = dict[str, Any]

# LBFGS computes the loss several times in a step; SparseAdam needs sparse gradients, which are not sent.
_UNSUPPORTED = {"Optimizer", "LBFGS", "SparseAdam"}
# How torch runs a step on a GPU or within a graph; a server does not need these options.
_SKIPPED = {"self", "params", "capturable", "differentiable"}


def describe(optimizer: Optimizer) -> Description:
    """The description of an optimizer, whose param groups must share all options.

    torch's optimizers as plain values, which a trainer can send to a server without pickle.

    A description is `{"name": "Adam", "options": {"lr": 0.001, "betas": [0.9, 0.999]}}`: a class of
    torch.optim and options of its constructor, as JSON values. Options that are not named have torch's
    defaults.
    """
    kind = type(optimizer)
    if _known().get(kind.__name__) is not kind:
        raise ValueError(
            f"A server can run one of torch.optim's {', '.join(_known())}, "
            f"but the optimizer is {kind.__module__}.{kind.__qualname__}."
        )
    names = _options_of(kind)
    first, *others = (
        {name: _plain(name, group[name]) for name in names if name in group}
        for group in optimizer.param_groups
    )
    for number, other in enumerate(others, 1):
        for name in names:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"A server has one set of options for all parameters: expected param groups that share "
                    f"them, but '{name}' is {first.get(name)} in group 0 and {other.get(name)} in group "
                    f"{number}."
                )
    return {"name": kind.__name__, "options": first}


def make_optimizer(description: Mapping[str, Any], parameters: Sequence[Tensor]) -> Optimizer:
    """The optimizer of a description; the list of parameters may be empty."""
    name, options = _parts(description)
    kind = _known().get(name)
    if kind is None:
        raise ValueError(f"Expected an optimizer out of {', '.join(_known())}, got {name!r}.")
    if unknown := [option for option in options if option not in _options_of(kind)]:
        raise ValueError(
            f"{name} has no option {', '.join(map(repr, unknown))}; expected some of "
            f"{', '.join(_options_of(kind))}."
        )
    # Torch requires at least one parameter; this one never gets a gradient.
    tensors = list(parameters) or [torch.zeros(1, 1)]
    values = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    try:
        optimizer: Optimizer = kind(tensors, **values)
        # A step with zeros: torch accepts some options, such as three betas, with which steps fail.
        trial = torch.zeros(1, 1)
        trial.grad = torch.zeros(1, 1)
        kind([trial], **values).step()
    except (TypeError, ValueError, RuntimeError, IndexError, OverflowError) as error:
        raise ValueError(f"{name} does not take the options {options}: {error}") from error
    return optimizer


def _parts(description: Any) -> tuple[str, dict[str, Any]]:
    match description:
        case {"name": str(name), "options": Mapping() as options} if len(description) == 2:
            return name, dict(options)
    text = repr(description)
    text = text if len(text) <= 200 else text[:200] + "…"
    raise ValueError(f"Expected an optimizer as {{'name': …, 'options': {{…}}}}, got {text}.")


def _known() -> dict[str, Any]:
    """The classes a description may name; their constructors have only `params` in common."""
    return {
        name: kind
        for name, kind in sorted(vars(torch.optim).items())
        if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in _UNSUPPORTED
    }


def _options_of(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in _SKIPPED]


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise ValueError(f"Option '{name}': expected numbers, text or None, got {type(value).__name__}.")


def rate_of(optimizer: Optimizer) -> float:
    """The learning rate of all parameters; they must have the same one."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) != 1:
        raise ValueError(
            "A server has one learning rate for all parameters: expected param groups that share it, "
            f"got {', '.join(map(str, sorted(rates)))}."
        )
    return rates.pop()
