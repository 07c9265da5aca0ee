"""`SparseAdagrad`: `kv.optim.Adagrad` with RecIS's arguments."""

from __future__ import annotations

from collections.abc import Mapping

from karvan.compat.recis.nn.modules.hashtable import SparseParameter, handles_of
from karvan.compat.recis.optim.sparse_optim import Accumulating
from karvan.compat.unsupported import require_default
from karvan.embedding.optim import Adagrad


class SparseAdagrad(Accumulating, Adagrad):
    """Adagrad on the rows with a gradient; weight_decay is added to gradients."""

    row_wise = False

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
        super().__init__(
            handles_of(param_dict),
            lr,
            lr_decay=lr_decay,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            weight_decay=weight_decay,
            row_wise=self.row_wise,
        )
