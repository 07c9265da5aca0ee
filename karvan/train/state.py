"""What a checkpoint of a Trainer has: all that later steps depend on, and nothing that depends on time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from karvan.train.gathering import gather_state, joined
from karvan.train.randomness import random_state

if TYPE_CHECKING:
    from karvan.train.trainer import Trainer


def take(trainer: Trainer) -> dict[str, Any]:
    """The state of everything but the data, the same on all ranks; a collective."""
    return {
        "model": trainer.model.state_dict(),
        **{f"{name}_optimizer": each.state_dict() for name, each in trainer.update.optimizers.items()},
        "scheduler": trainer.schedule.state_dict(),
        "scaler": trainer.precision.state_dict(),
        "callbacks": trainer.callbacks.state_dict(),
        "trainer": trainer.counts.state_dict(),
        "ranks": gather_state(trainer.connection.main, _own(trainer)),
    }


def _own(trainer: Trainer) -> dict[str, Any]:
    """What is another on every rank."""
    return {
        "metrics": {name: metric.state() for name, metric in trainer.metrics.items()},
        "window": trainer.window.state_dict(),
        "random": random_state(),
    }


def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Go back to what `take` gave, apart from the random generators."""
    trainer.model.load_state_dict(state["model"])
    for name, optimizer in trainer.update.optimizers.items():
        if f"{name}_optimizer" not in state:
            raise ValueError(f"The checkpoint has no {name} optimizer, but this Trainer has one.")
        optimizer.load_state_dict(state[f"{name}_optimizer"])
    trainer.schedule.load_state_dict(state["scheduler"])
    trainer.precision.load_state_dict(state["scaler"])
    trainer.callbacks.load_state_dict(state["callbacks"])
    trainer.counts.load_state_dict(state["trainer"])
    rank, saved = trainer.connection.rank, state["ranks"]
    for metric in trainer.metrics.values():
        metric.reset()
    if len(saved) == trainer.connection.world:
        for name, metric in trainer.metrics.items():
            if name in saved[rank]["metrics"]:
                metric.load_state(saved[rank]["metrics"][name])
        trainer.window.load_state_dict(saved[rank]["window"])
        return
    for name, metric in trainer.metrics.items() if rank == 0 else ():
        if name in saved[0]["metrics"]:
            metric.load_state(joined(metric, [each["metrics"][name] for each in saved]).state())
    trainer.window.load_share([each["window"] for each in saved], rank)


def random_of(trainer: Trainer, state: Mapping[str, Any]) -> Any:
    """This rank's random generators; another number of ranks shares out those that there are."""
    saved = state["ranks"]
    return saved[trainer.connection.rank % len(saved)]["random"]
