"""Optimizers of rows, over `kv.optim`, and `AdamWTF` for parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from karvan.compat.recis.nn import SparseParameter, handles_of
from karvan.compat.unsupported import UnsupportedError, require_default
from karvan.embedding import optim
from karvan.embedding.optim import Adagrad, Adam

__all__ = ["AdamWTF", "SparseAdagrad", "SparseAdam", "SparseAdamW", "SparseAdamWTF", "SparseRowWiseAdagrad"]


class AdamWTF(torch.optim.AdamW):
    """p *= 1 - weight_decay, then p -= alpha * m / (sqrt(v) + eps), alpha = lr * sqrt(1 - b2^t) / (1 - b1^t).

    torch's AdamW multiplies weight_decay by lr, and eps by the correction of v; both are divided here. All
    parameters of a group make their steps together.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"AdamWTF expects lr above 0, got {lr}.")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def step(self, closure: Any = None) -> Any:
        """One step of all parameters with a gradient."""
        settings = [(group["eps"], group["weight_decay"]) for group in self.param_groups]
        for group in self.param_groups:
            group["eps"] = group["eps"] / math.sqrt(1 - group["betas"][1] ** (self._steps(group) + 1))
            group["weight_decay"] = group["weight_decay"] / float(group["lr"])
        try:
            return super().step(closure)
        finally:
            for group, (eps, decay) in zip(self.param_groups, settings, strict=True):
                group["eps"], group["weight_decay"] = eps, decay

    def _steps(self, group: dict[str, Any]) -> int:
        counts = [
            self.state[parameter]["step"]
            for parameter in group["params"]
            if "step" in self.state.get(parameter, {})
        ]
        return int(max(counts)) if counts else 0


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


class SparseAdam(AdamArguments):
    """Adam without decay: as in RecIS, weight_decay changes nothing. Only rows with a gradient change."""

    decays = False


class SparseAdamW(AdamArguments, optim.AdamW):
    """Adam, with p *= 1 - lr * weight_decay. Only rows with a gradient change."""


class SparseAdamWTF(AdamArguments, optim.AdamWTF):
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
