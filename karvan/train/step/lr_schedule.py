"""Learning-rate schedules: torch's schedulers on the dense and the sparse optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Maker: TypeAlias = Callable[[Optimizer], LRScheduler]
Given: TypeAlias = LRScheduler | Maker
Schedulers: TypeAlias = Given | Iterable[Given] | Mapping[str, Given] | None

_EXAMPLE = (
    "a function of an optimizer that makes a torch scheduler, such as "
    "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)"
)


class Schedule:
    """All schedulers of a Trainer; they advance after every step that was taken, or after every epoch.

    A function is called with every optimizer, dense and sparse, and makes a scheduler for it. A mapping with
    "dense" and "sparse" has one for each. A scheduler object is used as it is. ReduceLROnPlateau advances
    after every evaluation of a fit instead, by its loss.
    """

    def __init__(self, schedulers: Schedulers, optimizers: Mapping[str, Optimizer], per: str) -> None:
        if per not in ("step", "epoch"):
            raise ValueError(f"schedule_per must be 'step' or 'epoch', got {per!r}.")
        self._per = per
        self._schedulers = list(_make(schedulers, optimizers))
        for scheduler in self._schedulers:
            if not isinstance(scheduler, LRScheduler):
                raise TypeError(f"scheduler expects {_EXAMPLE}, got {_text_of(scheduler)}.")
            if not any(scheduler.optimizer is optimizer for optimizer in optimizers.values()):
                raise ValueError(
                    "scheduler expects schedulers of this Trainer's optimizers, but the "
                    f"{type(scheduler).__name__} changes the learning rates of another optimizer: give it "
                    "a function."
                )

    @property
    def metric(self) -> str | None:
        """The metric of evaluations by which a scheduler decides, if there is one."""
        return (
            "loss"
            if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers)
            else None
        )

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """An evaluation is over: schedulers that wait for one follow its loss."""
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(metrics["loss"])

    def after_step(self) -> None:
        """A step was taken."""
        self._move("step")

    def after_epoch(self) -> None:
        """An epoch ended."""
        self._move("epoch")

    def _move(self, moment: str) -> None:
        for scheduler in self._schedulers if moment == self._per else ():
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state for checkpoints."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        states = state["schedulers"]
        if len(states) != len(self._schedulers):
            raise ValueError(
                f"The checkpoint has {len(states)} schedulers, but this Trainer has {len(self._schedulers)}."
            )
        for scheduler, its in zip(self._schedulers, states, strict=True):
            # MultiStepLR has its milestones in a Counter, and a checkpoint has only plain dicts.
            counters = {name for name, value in vars(scheduler).items() if isinstance(value, Counter)}
            scheduler.load_state_dict({k: Counter(v) if k in counters else v for k, v in its.items()})

    def use_initial_rates(self) -> None:
        """Continue from the initial learning rates that the optimizers have now."""
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):  # it has none, and reduces whatever there is
                continue
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]


def _make(schedulers: Schedulers, optimizers: Mapping[str, Optimizer]) -> Iterable[Any]:
    if schedulers is None:
        return []
    if isinstance(schedulers, Mapping):
        if unknown := sorted(set(schedulers) - set(optimizers)):
            raise ValueError(
                f"There is no optimizer for the scheduler of {', '.join(map(repr, unknown))}; "
                f"there are: {', '.join(map(repr, optimizers))}."
            )
        return [_one(its, optimizers[name]) for name, its in schedulers.items()]
    if isinstance(schedulers, LRScheduler):
        return [schedulers]
    if callable(schedulers):
        return [_one(schedulers, optimizer) for optimizer in optimizers.values()]
    if isinstance(schedulers, str) or not isinstance(schedulers, Iterable):
        raise TypeError(f"scheduler expects {_EXAMPLE}, got {_text_of(schedulers)}.")
    listed = list(schedulers)
    if any(isinstance(item, list | tuple) for item in listed):  # which may contain itself
        raise TypeError(f"scheduler expects {_EXAMPLE}, or a list of them, got a list within a list.")
    return [scheduler for item in listed for scheduler in _make(item, optimizers)]


def _one(scheduler: Given, optimizer: Optimizer) -> Any:
    if isinstance(scheduler, LRScheduler):
        return scheduler
    if not callable(scheduler):
        raise TypeError(f"scheduler expects {_EXAMPLE}, got {_text_of(scheduler)}.")
    try:
        return scheduler(optimizer)
    except TypeError as error:
        name = getattr(scheduler, "__name__", type(scheduler).__name__)
        if not isinstance(scheduler, type):
            raise
        raise TypeError(
            f"scheduler expects a function of an optimizer, but {name} needs more: {error}. Give it "
            f"lambda optimizer: {name}(optimizer, …)."
        ) from error


def _text_of(value: object) -> str:
    return repr(value) if isinstance(value, str | int | float) else type(value).__name__
