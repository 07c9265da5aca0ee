"""See `karvan/compat/elasticdl/constants.py`."""

from karvan.compat.elasticdl.constants import DistributionStrategy

__all__ = ["DistributionStrategy"]
