"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from karvan.embedding.optim.base import Group, SparseOptimizer, Targets, limits
from karvan.store import Rule


class SGD(SparseOptimizer):
    """Stochastic gradient descent: p -= lr · b, with b = momentum · b + g.

    A row's momentum does not change while the row has no gradient.

    Args:
        params: An engine, a module with engines in it, a table, or param groups like torch's. Without it,
            call `attach` later; a Trainer does.
        lr: The learning rate.
        momentum: How much of the last update is kept; 0 needs no state.
        weight_decay: Its product with p is added to g.
        nesterov: Whether p -= lr · (g + momentum · b), as in torch.
        clip_value: The largest absolute value of an element of a key's summed gradient.
        clip_norm: The largest L2 norm of a key's summed gradient; it applies after `clip_value`.
        weight_bound: The largest absolute value of an element of a vector after the update.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> optimizer = kv.optim.SGD(engine, lr=0.1)
        >>> engine({"user": torch.tensor([7])})["user"].sum().backward()
        >>> optimizer.step()
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
        """Raise if `nesterov` lacks a momentum."""
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("SGD with nesterov=True expects a momentum above 0, got 0.")

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "sgd", "momentum" or "nesterov"."""
        rule = Rule(("nesterov" if group["nesterov"] else "momentum") if group["momentum"] else "sgd")
        rule.beta1 = group["momentum"]
        rule.weight_decay = group["weight_decay"]
        return rule

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """Return a momentum of zeros, or nothing."""
        return [0.0] * dim if group["momentum"] else []
