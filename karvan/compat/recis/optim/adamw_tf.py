"""`AdamWTF`: torch's AdamW for parameters, with the decay and the eps of TensorFlow."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import AdamW


class AdamWTF(AdamW):
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
        said = [(group["eps"], group["weight_decay"]) for group in self.param_groups]
        for group in self.param_groups:
            group["eps"] = group["eps"] / math.sqrt(1 - group["betas"][1] ** (self._steps(group) + 1))
            group["weight_decay"] = group["weight_decay"] / float(group["lr"])
        try:
            return super().step(closure)
        finally:
            for group, (eps, decay) in zip(self.param_groups, said, strict=True):
                group["eps"], group["weight_decay"] = eps, decay

    def _steps(self, group: dict[str, Any]) -> int:
        counts = [self.state[each]["step"] for each in group["params"] if "step" in self.state.get(each, {})]
        return int(max(counts)) if counts else 0
