"""See `karvan/compat/elasticdl/readers.py`."""

from karvan.compat.elasticdl.readers import AbstractDataReader, Metadata

__all__ = ["AbstractDataReader", "Metadata"]
