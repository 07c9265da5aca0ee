"""`TrainerParts`: what a fit, its reports and its checkpoints use of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from karvan.data.columns.kinds import ColumnKind
from karvan.data.identity import Identity
from karvan.distributed import Connection
from karvan.train.assembly import TrainingSetup
from karvan.train.callbacks import Callbacks
from karvan.train.evaluation import Evaluator
from karvan.train.loggers import LoggerGroup
from karvan.train.progress import NoProgress
from karvan.train.results import ReportWindow, TrainingCounts
from karvan.train.saving import NoSaver
from karvan.train.step.lr_schedule import Schedule
from karvan.train.stopping import StopRequest
from karvan.train.types import Loss, MetricLike


@dataclass
class RunProgress:
    """How far a Trainer's run is, from one fit to the next."""

    counts: TrainingCounts
    window: ReportWindow
    data_identity: Identity | None = None  # of the last fit without checkpoints
    columns: Mapping[str, ColumnKind] = field(default_factory=dict)  # that the model was trained with
    banner_shown: bool = False  # a Trainer shows its banner once


@dataclass(frozen=True)
class TrainerParts:
    """The parts of a Trainer, as they are when a fit begins."""

    setup: TrainingSetup
    loss: Loss
    metrics: dict[str, MetricLike]
    schedule: Schedule
    callbacks: Callbacks
    saver: NoSaver
    evaluator: Evaluator
    loggers: LoggerGroup
    progress: NoProgress
    log_every: int | None  # None: `report_period`, and progress may show numbers between
    resume_hint: str  # for people, after Ctrl-C
    nonfinite: str
    run: RunProgress
    stop_request: StopRequest

    def count(self, output: Any, batch: Any) -> None:
        """Count the output for a batch in all metrics."""
        for metric in self.metrics.values():
            metric.update(output, batch)

    @property
    def model(self) -> nn.Module:
        """The model, on its device."""
        return self.setup.runs.model

    @property
    def connection(self) -> Connection:
        """How this process trains together with others."""
        return self.setup.runs.connection

    @property
    def counts(self) -> TrainingCounts:
        """How far training is."""
        return self.run.counts

    @property
    def window(self) -> ReportWindow:
        """The losses since the last report."""
        return self.run.window
