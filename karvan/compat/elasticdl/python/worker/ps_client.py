"""See `karvan/compat/elasticdl/ps_client.py`."""

from karvan.compat.elasticdl.ps_client import EmbeddingTableInfo, PSClient

__all__ = ["EmbeddingTableInfo", "PSClient"]
