"""Optimizers that continue from a checkpoint: their state must fit, and the settings of the checkpoint win.

A resumed fit continues with the learning rate and the other settings of the checkpoint, as schedulers have
changed them. If the program sets others, there is a warning, and `new_settings` uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

_log = logging.getLogger("karvan.train")

# How torch computes a step, which depends on the device: the program's, whatever the checkpoint has.
_OWN = ("foreach", "fused")
KINDS = "optimizer_kinds"  # in the state of a checkpoint: the classes of its optimizers


def kinds_of(optimizers: Mapping[str, Optimizer]) -> dict[str, str]:
    """The class of each optimizer, for a checkpoint."""
    return {name: type(optimizer).__name__ for name, optimizer in optimizers.items()}


def restore_optimizer(
    name: str, optimizer: Optimizer, state: Mapping[str, Any], *, new_settings: bool, warns: bool
) -> None:
    """Load the state of a checkpoint into an optimizer; an error that says what to do if it does not fit.

    new_settings: keep the learning rate and the other settings of the program. warns: whether this rank warns
    of settings that are not used.
    """
    if f"{name}_optimizer" not in state:
        raise ValueError(f"The checkpoint has no {name} optimizer, but there is one here.")
    saved, kind = state[f"{name}_optimizer"], type(optimizer).__name__
    before = state.get(KINDS, {}).get(name, kind)
    if before != kind:
        raise ValueError(
            f"The {name} optimizer of the checkpoint is {before}, got {kind}, which cannot use the saved "
            "state: expected the same kind, or a warm start (kv.checkpoint.warm_start) into another "
            "folder."
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != saved_sizes:
        raise ValueError(
            f"The {name} optimizer of the checkpoint has {_counts(saved_sizes)}, got one of "
            f"{_counts(sizes)}: expected the same parameters, with the same `frozen`, or a warm start "
            "(kv.checkpoint.warm_start) into another folder."
        )
    given = [_settings(group) for group in optimizer.param_groups]
    own = [{name: group[name] for name in _OWN if name in group} for group in optimizer.param_groups]
    groups = [{**group, **mine} for group, mine in zip(saved["param_groups"], own, strict=True)]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    if new_settings:
        for group, settings in zip(optimizer.param_groups, given, strict=True):
            if group.get("initial_lr"):  # the schedule continues from the new rate
                group["lr"] *= settings.get("initial_lr", group["initial_lr"]) / group["initial_lr"]
            group.update(settings)
    elif warns:
        _warn_unused(name, kind, given, [_settings(group) for group in optimizer.param_groups])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; with a scheduler, the initial learning rate."""
    names = [name for name in group if name not in ("params", "lr" if "initial_lr" in group else "")]
    return {name: group[name] for name in names}


def _warn_unused(name: str, kind: str, given: list[dict[str, Any]], used: list[dict[str, Any]]) -> None:
    different = {
        setting: (value, after[setting])
        for before, after in zip(given, used, strict=True)
        for setting, value in before.items()
        if setting in after and _differs(value, after[setting])
    }
    if different:
        listed = ", ".join(f"{s}={after!r} (given: {value!r})" for s, (value, after) in different.items())
        _log.warning(
            "The %s optimizer, %s, continues with the checkpoint's settings: %s. To use your program's "
            "settings, call fit(…, new_settings=True).",
            name,
            kind,
            listed,
        )


def _differs(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) != list(other)
    return bool(one != other)


def _counts(sizes: list[int]) -> str:
    return f"{' + '.join(map(str, sizes))} parameters"
