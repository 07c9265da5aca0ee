"""Variable-length data in RecIS's form."""

from karvan.compat.recis.ragged.tensor import RaggedTensor

__all__ = ["RaggedTensor"]
