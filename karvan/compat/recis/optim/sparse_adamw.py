"""`SparseAdamW`: `kv.optim.AdamW` with RecIS's arguments."""

from __future__ import annotations

from karvan.compat.recis.optim.sparse_optim import AdamArguments
from karvan.embedding.optim import AdamW


class SparseAdamW(AdamArguments, AdamW):
    """Adam, with p *= 1 - lr * weight_decay. Only rows with a gradient change."""
