"""See `karvan/compat/elasticdl/ps_client.py`."""

from karvan.compat.elasticdl.ps_client import EmbeddingTableInfo, PSClient, build_ps_client

__all__ = ["EmbeddingTableInfo", "PSClient", "build_ps_client"]
