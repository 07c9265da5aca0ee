"""`SparseAdagrad`: `kv.optim.Adagrad` with RecIS's arguments."""

from __future__ import annotations

from collections.abc import Mapping

from karvan.compat.recis.nn.modules.hashtable import SparseParameter
from karvan.compat.recis.optim.sparse_optim import AdagradArguments
from karvan.compat.unsupported import require_default


class SparseAdagrad(AdagradArguments):
    """Adagrad on the rows with a gradient; weight_decay is added to gradients."""

    def __init__(
        self,
        param_dict: Mapping[str, SparseParameter],
        lr: float = 1e-3,
        lr_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        weight_decay: float = 0,
        save_update_info_interval: int = 0,
    ) -> None:
        require_default(
            "save_update_info_interval", save_update_info_interval, 0, "read rows by HashTable.embeddings()."
        )
        super().__init__(param_dict, lr, lr_decay, initial_accumulator_value, eps, weight_decay)
