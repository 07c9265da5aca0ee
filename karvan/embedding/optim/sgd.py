"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from karvan.embedding.optim.base import Group, SparseOptimizer, Targets, limits
from karvan.store import Rule


class SGD(SparseOptimizer):
    """p -= lr * b with b = momentum * b + g, where g includes weight_decay * p.

    A row's momentum does not change while the row has no gradient. nesterov: p -= lr * (g + momentum * b), as
    torch does.
    """

    def __init__(
        self,
        params: Targets | None = None,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        weight_bound: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults | limits(clip_value, clip_norm, weight_bound))

    def check_group(self, group: Group) -> None:
        """See `SparseOptimizer.check_group`."""
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("SGD with nesterov=True expects a momentum above 0, got 0.")

    def rule(self, group: Group, step: int) -> Rule:
        """See `SparseOptimizer.rule`."""
        rule = Rule(("nesterov" if group["nesterov"] else "momentum") if group["momentum"] else "sgd")
        rule.beta1 = group["momentum"]
        rule.weight_decay = group["weight_decay"]
        return rule

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """See `SparseOptimizer.initial_state`."""
        return [0.0] * dim if group["momentum"] else []
