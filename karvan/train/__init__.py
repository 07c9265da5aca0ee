"""Training: the Trainer, its parts, losses, callbacks and contexts."""

from typing import TYPE_CHECKING

from karvan.argument_checks import publish

if TYPE_CHECKING:
    from karvan.dense.communication import PowerSGD
    from karvan.train import callbacks, losses
    from karvan.train.callbacks import EMA
    from karvan.train.contexts import EvalContext, InferContext
    from karvan.train.elastic_loop import ElasticLoop
    from karvan.train.evaluation import write_predictions
    from karvan.train.losses import report
    from karvan.train.progress import BarProgress, NoProgress, PlainProgress
    from karvan.train.results import FitResult, Report, StepLogs
    from karvan.train.stopping import TerminatedError, reset_termination
    from karvan.train.train_context import TrainContext
    from karvan.train.trainer import Trainer, TrainingJob
    from karvan.train.types import PredictedRecords, Prediction

__all__ = [
    "Trainer",
    "TrainContext",
    "EvalContext",
    "InferContext",
    "TrainingJob",
    "FitResult",
    "Prediction",
    "PredictedRecords",
    "write_predictions",
    "report",
    "StepLogs",
    "Report",
    "BarProgress",
    "PlainProgress",
    "NoProgress",
    "PowerSGD",
    "ElasticLoop",
    "TerminatedError",
    "reset_termination",
    "EMA",
    "callbacks",
    "losses",
]

# The module of each public name, imported at first use: losses and the parts of a step (`karvan.train.step`)
# need neither pyarrow nor what else the Trainer needs.
publish(
    "karvan.train",
    {
        "karvan.dense.communication": "PowerSGD",
        "karvan.train": "callbacks losses",
        "karvan.train.callbacks": "EMA",
        "karvan.train.contexts": "EvalContext InferContext",
        "karvan.train.elastic_loop": "ElasticLoop",
        "karvan.train.losses": "report",
        "karvan.train.evaluation": "write_predictions",
        "karvan.train.progress": "BarProgress NoProgress PlainProgress",
        "karvan.train.results": "FitResult Report StepLogs",
        "karvan.train.stopping": "TerminatedError reset_termination",
        "karvan.train.train_context": "TrainContext",
        "karvan.train.trainer": "Trainer TrainingJob",
        "karvan.train.types": "PredictedRecords Prediction",
    },
)
