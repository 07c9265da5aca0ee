"""What RecIS's sparse optimizers have beside those of `kv.optim`: their arguments, `set_grad_accum_steps`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from karvan.compat.recis.nn.modules.hashtable import SparseParameter, handles_of
from karvan.compat.unsupported import UnsupportedError
from karvan.embedding.optim import Adagrad, Adam


class Accumulating:
    """Gradients of several backward passes are summed; `step` applies them all."""

    def set_grad_accum_steps(self, steps: int) -> None:
        """Not supported, except for 1."""
        if steps != 1:
            raise UnsupportedError(
                f"set_grad_accum_steps({steps})",
                "give TrainingArguments gradient_accumulation_steps, or call step() after the last batch.",
            )


class AdamArguments(Accumulating, Adam):
    """An Adam with RecIS's arguments; decays: whether weight_decay has a meaning."""

    decays = True

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
        if not self.decays and weight_decay not in (0, 0.01):
            warnings.warn(
                f"weight_decay={weight_decay} of {type(self).__name__} changes nothing, as in RecIS: "
                "SparseAdamW shrinks rows.",
                stacklevel=2,
            )
        decay = weight_decay if self.decays else 0.0
        super().__init__(handles_of(param_dict), lr, (beta1, beta2), eps, decay, amsgrad=amsgrad)


class AdagradArguments(Accumulating, Adagrad):
    """An Adagrad with RecIS's arguments; weight_decay is added to gradients."""

    row_wise = False

    def __init__(
        self,
        param_dict: Mapping[str, SparseParameter],
        lr: float = 1e-3,
        lr_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(
            handles_of(param_dict),
            lr,
            lr_decay=lr_decay,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
            weight_decay=weight_decay,
            row_wise=self.row_wise,
        )
