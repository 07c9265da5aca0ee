"""`SparseAdamW`: `kv.optim.AdamW` with RecIS's arguments."""

from __future__ import annotations

from collections.abc import Mapping

from karvan.compat.recis.nn.modules.hashtable import SparseParameter, handles_of
from karvan.compat.recis.optim.sparse_optim import Accumulating
from karvan.embedding.optim import AdamW


class SparseAdamW(Accumulating, AdamW):
    """Adam, with p *= 1 - lr * weight_decay. Only rows with a gradient change."""

    def __init__(
        self,
        param_dict: Mapping[str, SparseParameter],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(handles_of(param_dict), lr, (beta1, beta2), eps, weight_decay, amsgrad=amsgrad)
