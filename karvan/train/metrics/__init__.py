"""Streaming metrics: updated batch by batch, merged over ranks. Public as `kv.metrics`."""

from karvan.train.metrics.accuracy import Accuracy
from karvan.train.metrics.auc import AUC
from karvan.train.metrics.base import Metric, State
from karvan.train.metrics.calibration import Calibration
from karvan.train.metrics.gauc import GAUC
from karvan.train.metrics.hit_rate import HitRate
from karvan.train.metrics.logloss import LogLoss
from karvan.train.metrics.mae import MAE
from karvan.train.metrics.mean import Mean
from karvan.train.metrics.mse import MSE
from karvan.train.metrics.ndcg import NDCG

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
