"""torch's optimizers as plain values, which a trainer can send to a server without pickle.

A description is `{"name": "Adam", "options": {"lr": 0.001, "betas": [0.9, 0.999]}}`: a class of torch.optim
and options of its constructor, as JSON values. Options that are not named have torch's defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

Description: TypeAlias = dict[str, Any]

# LBFGS computes the loss several times in a step; SparseAdam needs sparse gradients, which are not sent.
_UNSUPPORTED = {"Optimizer", "LBFGS", "SparseAdam"}
# How torch runs a step on a GPU or within a graph; a server does not need these options.
_SKIPPED = {"self", "params", "capturable", "differentiable"}


def describe(optimizer: Optimizer) -> Description:
    """The description of an optimizer, whose param groups must share all options."""
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
