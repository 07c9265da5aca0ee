"""See `karvan/compat/elasticdl/ps_client.py`."""

from karvan.compat.elasticdl.ps_client import NamedGradient as Tensor

__all__ = ["Tensor"]
