"""`ClipGradNormHook`: `clip_norm` of a `kv.Trainer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from karvan.compat.recis.hooks.trainer_option import TrainerOption
from karvan.compat.unsupported import UnsupportedError


class ClipGradNormHook(TrainerOption):
    """Limits the L2 norm of the gradients of all parameters, once for each step.

    dense_params are those of the dense optimizer. sparse_params is refused unless it is empty. With
    error_if_nonfinite gradients that are not finite raise a FloatingPointError; without it they are dropped,
    as those of every step.
    """

    def __init__(
        self,
        dense_params: Tensor | Iterable[Tensor],
        sparse_params: Iterable[Any] | None,
        max_norm: float,
        error_if_nonfinite: bool = False,
    ) -> None:
        if sparse_params is not None and list(sparse_params):
            raise UnsupportedError(
                "ClipGradNormHook(sparse_params=…), one norm of parameters and rows together,",
                "clip the gradient of each row by kv.optim.AdamW(clip_norm=…).",
            )
        self.dense_params = [dense_params] if isinstance(dense_params, Tensor) else list(dense_params)
        self.max_norm, self.error_if_nonfinite = float(max_norm), error_if_nonfinite

    @override
    def options(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        groups = [] if optimizer is None else optimizer.param_groups
        trained = {id(each) for group in groups for each in group["params"]}
        if {id(each) for each in self.dense_params} != trained:
            raise UnsupportedError(
                f"ClipGradNormHook for {len(self.dense_params)} parameters beside a dense optimizer of "
                f"{len(trained)}",
                "expected the same parameters.",
            )
        return {"clip_norm": self.max_norm, "nonfinite": "raise" if self.error_if_nonfinite else "skip"}
