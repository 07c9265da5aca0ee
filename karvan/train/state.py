"""What a checkpoint of a Trainer has: all that later steps depend on, and nothing that depends on time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from karvan.train.randomness import random_state

if TYPE_CHECKING:
    from karvan.train.trainer import Trainer


def take(trainer: Trainer) -> dict[str, Any]:
    """The state of everything but the data."""
    return {
        "model": trainer.model.state_dict(),
        **{f"{name}_optimizer": each.state_dict() for name, each in trainer.update.optimizers.items()},
        "scheduler": trainer.schedule.state_dict(),
        "scaler": trainer.precision.state_dict(),
        "callbacks": trainer.callbacks.state_dict(),
        "metrics": {name: metric.state() for name, metric in trainer.metrics.items()},
        "window": trainer.window.state_dict(),
        "trainer": trainer.counts.state_dict(),
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
    for name, metric in trainer.metrics.items():
        metric.reset()
        if name in state["metrics"]:
            metric.load_state(state["metrics"][name])
    trainer.window.load_state_dict(state["window"])
    trainer.counts.load_state_dict(state["trainer"])
