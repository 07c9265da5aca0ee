"""Training: the Trainer, what it is made of, and metrics."""

from karvan.train import losses, metrics
from karvan.train.callbacks import Callback, EarlyStopping
from karvan.train.context import TrainContext
from karvan.train.eval_context import EvalContext, InferContext
from karvan.train.evaluation import Prediction
from karvan.train.job import Job
from karvan.train.logs import CsvLog, JsonLinesLog, Log, TensorBoardLog
from karvan.train.progress import BarProgress, NoProgress, PlainProgress
from karvan.train.results import FitResult, Report, StepLogs
from karvan.train.signals import TerminatedError, reset_termination
from karvan.train.trainer import Trainer

__all__ = [
    "BarProgress",
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "EvalContext",
    "FitResult",
    "InferContext",
    "Job",
    "JsonLinesLog",
    "Log",
    "NoProgress",
    "PlainProgress",
    "Prediction",
    "Report",
    "StepLogs",
    "TensorBoardLog",
    "TerminatedError",
    "TrainContext",
    "Trainer",
    "losses",
    "metrics",
    "reset_termination",
]
