"""`SparseRowWiseAdagrad`: `kv.optim.Adagrad(row_wise=True)` with RecIS's arguments."""

from __future__ import annotations

from collections.abc import Mapping

from karvan.compat.recis.nn.modules.hashtable import SparseParameter, handles_of
from karvan.compat.recis.optim.sparse_optim import Accumulating, require_no_decay
from karvan.compat.unsupported import require_default
from karvan.embedding.optim import Adagrad


class SparseRowWiseAdagrad(Accumulating, Adagrad):
    """Adagrad with one accumulator for each row."""

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
        require_no_decay(lr_decay)
        super().__init__(
            handles_of(param_dict),
            lr,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            weight_decay=weight_decay,
            row_wise=True,
        )
