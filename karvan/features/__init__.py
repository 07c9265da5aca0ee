"""Base classes of steps for `Feature.then`, and the plan of a FeatureEngine."""

from karvan.argument_checks import publish
from karvan.features.engine import FeatureEngine, Stage
from karvan.features.feature import Feature
from karvan.features.ops.base import ElementOp, Op, RowOp

__all__ = ["Feature", "FeatureEngine", "Op", "ElementOp", "RowOp", "Stage"]

publish("karvan.features")
