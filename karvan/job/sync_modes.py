"""Synchronisation modes of jobs on parameter servers: sync, hybrid, async.

| mode | rows | dense parameters |
|---|---|---|
| sync | lookups and gradients of all trainers together, staleness 1 | gradients averaged over trainers |
| hybrid | each trainer by itself, up to `staleness` batches behind | the same |
| async | the same | on the servers; each trainer pulls them, and pushes its gradients |

What makes a step of dense gradients that were pushed is for `DenseSettings` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from karvan.job.environment import JobEnvironment, ServerLoss


@dataclass(frozen=True)
class DenseSettings:
    """Every push a step, at a rate divided by its staleness if lr_staleness; or steps of several pushes.

    With grads_to_wait, that many pushes make a step with their mean, and those more than `tolerance` versions
    behind are rejected, computed again and pushed again. None for both: nobody waits, nothing is rejected.

    pull_every: a trainer takes the servers' parameters before every pull_every-th step. Between two of these
    it makes steps of its own, with its optimizer and its gradients, and still pushes each gradient.
    """

    lr_staleness: bool = False
    grads_to_wait: int | None = None
    tolerance: int | None = None
    pull_every: int = 1

    def __post_init__(self) -> None:
        if type(self.pull_every) is not int or self.pull_every < 1:
            raise ValueError(f"pull_every must be a whole number from 1 on, got {self.pull_every!r}.")
        if self.grads_to_wait is not None and self.grads_to_wait < 1:
            raise ValueError(f"grads_to_wait must be at least 1, got {self.grads_to_wait}.")
        if self.tolerance is not None and self.tolerance < 0:
            raise ValueError(f"tolerance must not be negative, got {self.tolerance}.")
        if self.lr_staleness and self.rejects:
            raise ValueError(
                "lr_staleness slows down stale pushes, grads_to_wait and tolerance reject them: "
                "expected one or the other, got both."
            )

    @property
    def rejects(self) -> bool:
        """Whether a push may be rejected."""
        return self.grads_to_wait is not None or self.tolerance is not None

    @property
    def together(self) -> int:
        """How many pushes make a step."""
        return self.grads_to_wait or 1

    def refuses(self, staleness: int) -> bool:
        """Whether a push is too many versions behind."""
        return self.rejects and staleness > (self.tolerance or 0)

    def slowed(self, rate: float, staleness: int) -> float:
        """The learning rate for a push so many versions behind."""
        return rate / max(1, staleness) if self.lr_staleness else rate


class SyncMode:
    """What one mode decides; `MODES` has one object of each."""

    name: ClassVar[str]
    default_staleness: ClassVar[int] = 4
    joint_rows: ClassVar[bool] = False  # lookups and gradients of all trainers at once, in rounds
    joint_steps: ClassVar[bool] = True  # a step has the gradients of all trainers, or no trainer makes it
    dense_on_servers: ClassVar[bool] = False

    def check_staleness(self, staleness: int) -> None:
        """Raise a ValueError for a number of batches that the mode does not allow."""
        if staleness < 1:
            raise ValueError(f"staleness must be at least 1, got {staleness}.")

    def check_dense(self, options: Iterable[str]) -> None:
        """Raise a ValueError if options of `DenseSettings` are given that the mode has no use for."""
        if names := ", ".join(options):
            raise ValueError(f"{names} is for mode async, got mode {self.name}.")

    def check_server_loss(self, chosen: ServerLoss) -> None:
        """Raise a ValueError if the mode cannot continue in this way without a server."""

    def gradients_per_step(self, trainers: int, dense: DenseSettings) -> int:
        """How many trainers' gradients make a step."""
        return trainers


class _Sync(SyncMode):
    name = "sync"
    default_staleness = 1
    joint_rows = True

    def check_staleness(self, staleness: int) -> None:
        super().check_staleness(staleness)
        if staleness != 1:
            raise ValueError(
                f"mode sync has staleness 1, got {staleness}; modes hybrid and async allow more."
            )


class _Hybrid(SyncMode):
    name = "hybrid"


class _Async(SyncMode):
    name = "async"
    joint_steps = False
    dense_on_servers = True

    def check_dense(self, options: Iterable[str]) -> None:
        """All options are for this mode."""

    def check_server_loss(self, chosen: ServerLoss) -> None:
        if chosen is ServerLoss.RELOAD:
            raise ValueError(
                "on_server_loss reload is for modes sync and hybrid. In mode async a lost server has "
                "dense parameters as well, and only a rollback restores them."
            )

    def gradients_per_step(self, trainers: int, dense: DenseSettings) -> int:
        return dense.together


SYNC, HYBRID, ASYNC = _Sync(), _Hybrid(), _Async()
MODES: Mapping[str, SyncMode] = {mode.name: mode for mode in (SYNC, HYBRID, ASYNC)}


def choose_mode(
    mode: str | None, staleness: int | None, environment: Mapping[str, str] | None = None
) -> tuple[SyncMode, int]:
    """The mode and its staleness: as they are given, as a launched job says, or what follows from the other.

    Of a job's staleness nothing is taken if the mode is given as sync. Without anything, the mode is sync.
    """
    job = JobEnvironment.read(environment)
    name = (job.mode or None) if mode is None else mode
    if name is not None and name not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {name!r}.")
    if staleness is None and mode != SYNC.name:
        staleness = job.staleness
    if name is None:
        name = SYNC.name if staleness in (None, 1) else HYBRID.name
    chosen = MODES[name]
    if staleness is None:
        staleness = chosen.default_staleness
    chosen.check_staleness(staleness)
    return chosen, staleness


def choose_dense(
    mode: SyncMode,
    lr_staleness: bool | None,
    grads_to_wait: int | None,
    tolerance: int | None,
    pull_every: int | None,
    environment: Mapping[str, str] | None = None,
) -> DenseSettings:
    """What is given, or what a launched job says; only mode async has any.

    Options of what makes a step are all taken from the program if it gives one of them, since some exclude
    others.
    """
    options: dict[str, Any] = {
        "lr_staleness": lr_staleness,
        "grads_to_wait": grads_to_wait,
        "tolerance": tolerance,
    }
    chosen = {name: value for name, value in options.items() if value is not None}
    mode.check_dense([*chosen, *(() if pull_every is None else ("pull_every",))])
    if not mode.dense_on_servers:
        return DenseSettings()
    job = JobEnvironment.read(environment)
    if not chosen:
        chosen = {name: getattr(job, name) for name in options if getattr(job, name) is not None}
    chosen["lr_staleness"] = bool(chosen.get("lr_staleness", False))
    if pull_every is None:
        pull_every = 1 if job.pull_every is None else job.pull_every
    return DenseSettings(**chosen, pull_every=pull_every)
