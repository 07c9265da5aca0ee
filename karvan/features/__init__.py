"""Features: from raw columns to ids and floats, many features in one call."""

from karvan.features.engine import FeatureEngine
from karvan.features.feature import Feature
from karvan.features.op import ElementOp, Op, RowOp
from karvan.features.plan import Stage

__all__ = ["ElementOp", "Feature", "FeatureEngine", "Op", "RowOp", "Stage"]
