"""`SparseRowWiseAdagrad`: `kv.optim.Adagrad(row_wise=True)` with RecIS's arguments."""

from __future__ import annotations

from collections.abc import Mapping

from karvan.compat.recis.nn.modules.hashtable import SparseParameter
from karvan.compat.recis.optim.sparse_optim import AdagradArguments
from karvan.compat.unsupported import require_default


class SparseRowWiseAdagrad(AdagradArguments):
    """Adagrad with one accumulator for each row."""

    row_wise = True

    def __init__(
        self,
        param_dict: Mapping[str, SparseParameter],
        lr: float = 1e-3,
        lr_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        require_default("maximize", maximize, False, "negate the loss.")
        super().__init__(param_dict, lr, lr_decay, initial_accumulator_value, eps, weight_decay)
