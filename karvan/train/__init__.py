"""Training: the Trainer, its parts, losses, callbacks and contexts."""

from typing import TYPE_CHECKING, Any

from karvan.dense.communication import PowerSGD
from karvan.former_names import missing_name
from karvan.train import callbacks, losses
from karvan.train.contexts.eval_context import EvalContext, InferContext
from karvan.train.contexts.train_context import TrainContext
from karvan.train.prediction_files import write_predictions
from karvan.train.reporting.progress import BarProgress, NoProgress, PlainProgress
from karvan.train.reporting.results import FitResult, Report, StepLogs
from karvan.train.stopping.signals import TerminatedError, reset_termination
from karvan.train.trainer import Trainer
from karvan.train.training_job import TrainingJob
from karvan.train.types import PredictedRecords, Prediction

__all__ = [
    "BarProgress",
    "EvalContext",
    "FitResult",
    "InferContext",
    "NoProgress",
    "PlainProgress",
    "PowerSGD",
    "PredictedRecords",
    "Prediction",
    "Report",
    "StepLogs",
    "TerminatedError",
    "TrainContext",
    "Trainer",
    "TrainingJob",
    "callbacks",
    "losses",
    "reset_termination",
    "write_predictions",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing_name("karvan.train", name)
