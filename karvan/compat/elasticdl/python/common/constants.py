"""See `karvan/compat/elasticdl/constants.py`."""

from karvan.compat.elasticdl.constants import DistributionStrategy, Mode, TaskType

__all__ = ["DistributionStrategy", "Mode", "TaskType"]
