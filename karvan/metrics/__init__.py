"""Streaming metrics: updated batch by batch, merged over ranks. Public as `kv.metrics`."""

from karvan.metrics.accuracy import Accuracy
from karvan.metrics.auc import AUC
from karvan.metrics.base import Metric, State
from karvan.metrics.calibration import Calibration
from karvan.metrics.gauc import GAUC
from karvan.metrics.hit_rate import HitRate
from karvan.metrics.logloss import LogLoss
from karvan.metrics.mae import MAE
from karvan.metrics.mean import Mean
from karvan.metrics.mse import MSE
from karvan.metrics.ndcg import NDCG

__all__ = [
    "AUC",
    "GAUC",
    "MAE",
    "MSE",
    "NDCG",
    "Accuracy",
    "Calibration",
    "HitRate",
    "LogLoss",
    "Mean",
    "Metric",
    "State",
]
