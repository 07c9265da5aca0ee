"""The state in a checkpoint of training: all that later steps depend on.

It is taken between two steps. If the last batch of an epoch was trained but the epoch has not ended, the fit
that resumes has an epoch without batches left, so its end happens once. Of data without a position it has the
random generators as they were at the start of the epoch: a shuffling DataLoader then gives the same order
when it is skipped forward. A fit saves before its first evaluation; such a state says that the evaluation is
due, and the fit that resumes makes it first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from karvan.checkpoint.checkpoint import ORIGIN, TABLE_STEPS
from karvan.distributed import Connection
from karvan.train.assembly import TrainerParts, TrainingSetup
from karvan.train.optimizer_step import names_text
from karvan.train.results import TrainingCounts, gather_state, joined, random_state

# Optimizers that continue from a checkpoint: their state must fit, and the settings of the checkpoint win.
#
# A resumed fit continues with the learning rate and the other settings of the checkpoint, as schedulers have
# changed them. If the program sets others, there is a warning, and `new_settings` uses them.


_log = logging.getLogger("karvan.train")

# How torch computes a step, which depends on the device: the program's, whatever the checkpoint has.
_OWN = ("foreach", "fused")
KINDS = "optimizer_kinds"  # in the state of a checkpoint: the classes of its optimizers


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
    requested = [_settings(group) for group in optimizer.param_groups]
    unsaved = [{name: group[name] for name in _OWN if name in group} for group in optimizer.param_groups]
    groups = [{**group, **mine} for group, mine in zip(saved["param_groups"], unsaved, strict=True)]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    if new_settings:
        for group, settings in zip(optimizer.param_groups, requested, strict=True):
            if group.get("initial_lr"):  # the schedule continues from the new rate
                group["lr"] *= settings.get("initial_lr", group["initial_lr"]) / group["initial_lr"]
            group.update(settings)
    elif warns:
        _warn_unused(name, kind, requested, [_settings(group) for group in optimizer.param_groups])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group; with a scheduler, the initial learning rate."""
    names = [name for name in group if name not in ("params", "lr" if "initial_lr" in group else "")]
    return {name: group[name] for name in names}


def _warn_unused(name: str, kind: str, saved: list[dict[str, Any]], used: list[dict[str, Any]]) -> None:
    different = {
        setting: (value, after[setting])
        for before, after in zip(saved, used, strict=True)
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


def _differs(first: Any, other: Any) -> bool:
    if isinstance(first, list | tuple) and isinstance(other, list | tuple):
        return list(first) != list(other)
    return bool(first != other)


def _counts(sizes: list[int]) -> str:
    return f"{' + '.join(map(str, sizes))} parameters"


REDUCTION = "dense_reduction"  # in the state of a checkpoint: what PowerSGD has not sent yet, and its factors


def take(trainer: TrainerParts) -> dict[str, Any]:
    """The state of everything but the data, the same on all ranks; a collective."""
    position = {
        "metrics": {name: metric.state() for name, metric in trainer.metrics.items()},
        "window": trainer.window.state_dict(),
    }
    return {
        **take_trained(trainer.setup, trainer.counts, position),
        "scheduler": trainer.schedule.state_dict(),
        "callbacks": trainer.callbacks.state_dict(),
    }


def take_trained(setup: TrainingSetup, counts: TrainingCounts, position: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the model and its optimizers; `own` is further state of this rank alone."""
    runs, optimizers = setup.runs, setup.update.optimizers
    reduction = setup.routine.parallel.reduction
    if of_rank := reduction.rank_state():
        position = {**position, REDUCTION: of_rank}
    return {
        "model": _without_content(runs.model.state_dict()),
        **{f"{name}_optimizer": optimizer.state_dict() for name, optimizer in optimizers.items()},
        KINDS: {name: type(optimizer).__name__ for name, optimizer in optimizers.items()},
        TABLE_STEPS: {} if setup.update.sparse is None else setup.update.sparse.table_steps(),
        "scaler": runs.precision.state_dict(),
        "trainer": counts.state_dict(),
        "ranks": gather_state(runs.connection.main, {**position, "random": random_state()}),
        **({REDUCTION: of_all} if (of_all := reduction.state()) else {}),
    }


def _without_content(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without the random ids of the rows, so that equal runs have equal checkpoints; these have the rows."""
    return {
        name: {part: value for part, value in entry.items() if part != "content"}
        if name.endswith("_extra_state") and isinstance(entry, Mapping) and "tables" in entry
        else entry
        for name, entry in state.items()
    }


def check_fits(model: nn.Module, state: Mapping[str, Any], where: object) -> None:
    """Raise unless the parameters and buffers in the state of a checkpoint are those of a model."""
    saved = {name: tensor for name, tensor in state.get("model", {}).items() if isinstance(tensor, Tensor)}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    advice = (
        "expected the model that was trained, or another folder: a new run takes what fits by "
        "kv.checkpoint.warm_start."
    )
    for name in [name for name in saved if name in tensors]:
        if saved[name].shape != tensors[name].shape:
            raise ValueError(
                f"Parameter '{name}' has shape {tuple(tensors[name].shape)} in this model, but "
                f"{tuple(saved[name].shape)} in {where}: {advice}"
            )
    differing = {
        "lacks": [*tensors.keys() - saved.keys()],
        "has, but this model not,": [*saved.keys() - tensors.keys()],
    }
    for what, names in differing.items():
        if names and saved:
            raise ValueError(f"{where} {what} {names_text(sorted(names))}: {advice}")


def restore_trained(
    setup: TrainingSetup, counts: TrainingCounts, state: Mapping[str, Any], *, new_settings: bool = False
) -> None:
    """Restore what `take_trained` gave, except for the random generators.

    new_settings: optimizers keep the learning rates and other settings of the program.
    """
    if ORIGIN in state:
        raise ValueError(
            f"The checkpoint was imported from {state[ORIGIN]['system']}, so it has no run to continue: "
            "expected kv.checkpoint.warm_start for a new run, or Trainer.load to evaluate."
        )
    setup.runs.model.load_state_dict(state["model"])
    warns = setup.runs.connection.rank == 0
    for name, optimizer in setup.update.optimizers.items():
        restore_optimizer(name, optimizer, state, new_settings=new_settings, warns=warns)
    setup.runs.precision.load_state_dict(state["scaler"])
    counts.load_state_dict(state["trainer"])
    of_ranks = [rank_state.get(REDUCTION, {}) for rank_state in state["ranks"]]
    setup.routine.parallel.reduction.load(state.get(REDUCTION, {}), of_ranks, setup.runs.connection.rank)


def restore(trainer: TrainerParts, state: Mapping[str, Any], *, new_settings: bool = False) -> None:
    """Restore what `take` gave, except for the random generators; new_settings: see `restore_trained`."""
    restore_trained(trainer.setup, trainer.counts, state, new_settings=new_settings)
    trainer.schedule.load_state_dict(state["scheduler"])
    if new_settings:
        trainer.schedule.use_initial_rates()
    trainer.callbacks.load_state_dict(state["callbacks"])
    rank, saved = trainer.connection.rank, state["ranks"]
    for metric in trainer.metrics.values():
        metric.reset()
    if len(saved) == trainer.connection.world_size:
        for name, metric in trainer.metrics.items():
            if name in saved[rank]["metrics"]:
                metric.load_state(saved[rank]["metrics"][name])
        trainer.window.load_state_dict(saved[rank]["window"])
        return
    for name, metric in trainer.metrics.items() if rank == 0 else ():
        if name in saved[0]["metrics"]:
            metric.load_state(joined(metric, [rank_state["metrics"][name] for rank_state in saved]).state())
    trainer.window.load_share([rank_state["window"] for rank_state in saved], rank)


def random_of(connection: Connection, state: Mapping[str, Any]) -> Any:
    """This rank's random generators; if the number of ranks has changed, the saved ones are distributed."""
    saved = state["ranks"]
    return saved[connection.rank % len(saved)]["random"]
