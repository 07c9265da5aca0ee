"""`SparseAdamWTF`: `kv.optim.AdamWTF` with RecIS's arguments."""

from __future__ import annotations

from collections.abc import Mapping

from karvan.compat.recis.nn.modules.hashtable import SparseParameter
from karvan.compat.recis.optim.sparse_optim import AdamArguments
from karvan.compat.unsupported import require_default
from karvan.embedding.optim import AdamWTF


class SparseAdamWTF(AdamArguments, AdamWTF):
    """Adam, with p *= 1 - weight_decay. Only rows with a gradient change."""

    def __init__(
        self,
        param_dict: Mapping[str, SparseParameter],
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        use_nesterov: bool = False,
    ) -> None:
        require_default("use_nesterov", use_nesterov, False, "RecIS refuses it, too.")
        super().__init__(param_dict, lr, beta1, beta2, eps, weight_decay)
