"""Training: the Trainer, what it is made of, and metrics."""

from karvan import metrics
from karvan.train import losses
from karvan.train.callbacks import Callback, EarlyStopping
from karvan.train.contexts.eval_context import EvalContext, InferContext
from karvan.train.contexts.train_context import TrainContext
from karvan.train.evaluation import Prediction
from karvan.train.reporting.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from karvan.train.reporting.progress import BarProgress, NoProgress, PlainProgress
from karvan.train.reporting.results import FitResult, Report, StepLogs
from karvan.train.stopping.signals import TerminatedError, reset_termination
from karvan.train.trainer import Trainer
from karvan.train.training_job import TrainingJob

__all__ = [
    "BarProgress",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "EvalContext",
    "FitResult",
    "InferContext",
    "JSONLinesLogger",
    "Logger",
    "NoProgress",
    "PlainProgress",
    "Prediction",
    "Report",
    "StepLogs",
    "TensorBoardLogger",
    "TerminatedError",
    "TrainContext",
    "Trainer",
    "TrainingJob",
    "losses",
    "metrics",
    "reset_termination",
]
