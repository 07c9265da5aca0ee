"""Optimizers of rows, over `kv.optim`, and `AdamWTF` for parameters."""

from karvan.compat.recis.optim.adamw_tf import AdamWTF
from karvan.compat.recis.optim.sparse_adagrad import SparseAdagrad
from karvan.compat.recis.optim.sparse_adam import SparseAdam
from karvan.compat.recis.optim.sparse_adamw import SparseAdamW
from karvan.compat.recis.optim.sparse_adamw_tf import SparseAdamWTF
from karvan.compat.recis.optim.sparse_row_wise_adagrad import SparseRowWiseAdagrad
from karvan.compat.unsupported import missing_names

__all__ = [
    "AdamWTF",
    "SparseAdagrad",
    "SparseAdam",
    "SparseAdamW",
    "SparseAdamWTF",
    "SparseRowWiseAdagrad",
]

_TORCH = "use torch.optim.{}: checkpoints find parameters by name anyway."
__getattr__ = missing_names(
    "recis.optim",
    {
        **{f"Named{kind}": _TORCH.format(kind) for kind in ("Adagrad", "Adam", "AdamW", "SGD")},
        "NamedAdamWTF": "use AdamWTF: checkpoints find parameters by name anyway.",
        "wrapped_named_optimizer": "use the optimizer itself.",
    },
)
