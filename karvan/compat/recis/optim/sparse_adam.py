"""`SparseAdam`: `kv.optim.Adam` with RecIS's arguments."""

from __future__ import annotations

from karvan.compat.recis.optim.sparse_optim import AdamArguments


class SparseAdam(AdamArguments):
    """Adam without decay: as in RecIS, weight_decay changes nothing. Only rows with a gradient change."""

    decays = False
