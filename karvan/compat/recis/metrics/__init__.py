"""Metrics inside of models, over `kv.metrics`."""

from karvan.compat.recis.metrics.auroc import AUROC
from karvan.compat.recis.metrics.gauc import Gauc
from karvan.compat.unsupported import missing_names

__all__ = ["AUROC", "Gauc"]

__getattr__ = missing_names("recis.metrics", {"GAUC": "use Gauc: its forward takes labels first."})
