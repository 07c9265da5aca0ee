"""Checks states of dense parameters that a server receives.

torch's optimizers trust their slots: one of another shape or dtype makes a step read out of bounds. So the
slots of each parameter are compared with those that a new optimizer of that spec has after a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from karvan.dense.optimizer_spec import make_optimizer
from karvan.dense.wire_format import expect_gradients
from karvan.protocol.parameter_server import ANSWERS, OPTIMIZER, WAITING
from karvan.protocol.values import NUMBER

_MOST_STEPS = 2**53
_PARTS = ("version", "optimizer", "parameters", "slots", "waiting", "answers")


def check_state(state: Mapping[str, Any]) -> None:
    """A ValueError or RefusedError unless a server could have made the state."""
    if missing := [part for part in _PARTS if part not in state]:
        raise ValueError(f"Expected a state of dense parameters, but it has no {', '.join(sorted(missing))}.")
    NUMBER.check(state["version"], "version")
    OPTIMIZER.check(_listed(state["optimizer"]), "optimizer")
    ANSWERS.check(_listed(state["answers"]), "answers")
    parameters, slots, waiting = state["parameters"], state["slots"], state["waiting"]
    if not _is_tensors(parameters) or not isinstance(slots, Mapping) or not isinstance(waiting, list):
        raise ValueError("Expected parameters and slots by name and a list of pushes that wait.")
    _check_slots(state["optimizer"], parameters, slots)
    for push in waiting:
        gradients = push.get("gradients") if isinstance(push, Mapping) else None
        if not isinstance(gradients, Mapping) or not _is_tensors(gradients):
            raise ValueError("Expected the gradients of each push that waits, by name.")
        WAITING.check({name: each for name, each in push.items() if name != "gradients"}, "waiting")
        expect_gradients(parameters, gradients)


def _check_slots(
    optimizer: Mapping[str, Any], parameters: Mapping[str, Tensor], slots: Mapping[str, Any]
) -> None:
    known: dict[torch.Size, dict[str, str]] = {}
    for name, its in slots.items():
        if name not in parameters:
            raise ValueError(f"Slots for '{name}', which is not a parameter.")
        if not isinstance(its, Mapping):
            raise ValueError(f"Expected slots by name for '{name}', got {type(its).__name__}.")
        if not its:  # no step has been made yet
            continue
        shape = parameters[name].shape
        if shape not in known:
            known[shape] = _made_slots(optimizer, shape)
        received = {slot: _kind(value) for slot, value in its.items()}
        if received != known[shape]:
            raise ValueError(
                f"Expected the slots of '{name}' to be {_text(known[shape])}, got {_text(received)}."
            )
        # torch uses it as an exponent.
        if "step" in its and not 0 <= float(its["step"]) <= _MOST_STEPS:
            raise ValueError(f"Expected '{name}' to have made 0 to {_MOST_STEPS} steps, got {its['step']}.")


def _made_slots(optimizer: Mapping[str, Any], shape: torch.Size) -> dict[str, str]:
    parameter = torch.zeros(shape)
    parameter.grad = torch.zeros(shape)
    made = make_optimizer(optimizer, [parameter])
    made.step()
    return {slot: _kind(value) for slot, value in made.state.get(parameter, {}).items()}


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _text(slots: Mapping[str, str]) -> str:
    return ", ".join(f"{slot} {kind}" for slot, kind in sorted(slots.items())[:8]) or "none"


def _is_tensors(values: Any) -> bool:
    return isinstance(values, Mapping) and all(
        isinstance(name, str) and isinstance(each, Tensor) for name, each in values.items()
    )


def _listed(value: Any) -> Any:
    """As decoded from JSON: tuples become lists."""
    if isinstance(value, Mapping):
        return {name: _listed(each) for name, each in value.items()}
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value
