"""Metrics, updated batch by batch and merged over ranks: `metrics={"auc": kv.metrics.AUC()}` of a Trainer."""

from karvan.argument_checks import publish
from karvan.metrics.base import (
    Accuracy,
    BinaryCrossEntropy,
    Calibration,
    ClassAccuracy,
    Mean,
    MeanAbsoluteError,
    MeanSquaredError,
    Metric,
    State,
)
from karvan.metrics.ranking import AUC, GAUC, NDCG, HitRate

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
