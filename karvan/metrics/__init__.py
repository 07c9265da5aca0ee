"""Metrics, updated batch by batch and merged over ranks: `metrics={"auc": kv.metrics.AUC()}` of a Trainer."""

from karvan.metrics.accuracy import Accuracy, ClassAccuracy
from karvan.metrics.auc import AUC
from karvan.metrics.base import Metric, State
from karvan.metrics.calibration import Calibration
from karvan.metrics.gauc import GAUC
from karvan.metrics.hit_rate import HitRate
from karvan.metrics.logloss import BinaryCrossEntropy
from karvan.metrics.mae import MeanAbsoluteError
from karvan.metrics.mean import Mean
from karvan.metrics.mse import MeanSquaredError
from karvan.metrics.ndcg import NDCG
from karvan.public_names import publish

__all__ = [
    "AUC",
    "GAUC",
    "BinaryCrossEntropy",
    "Calibration",
    "NDCG",
    "HitRate",
    "Accuracy",
    "ClassAccuracy",
    "MeanSquaredError",
    "MeanAbsoluteError",
    "Mean",
    "Metric",
    "State",
]

publish("karvan.metrics")
