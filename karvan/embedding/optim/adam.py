"""Adam (Kingma, Ba 2015) on the rows that have a gradient, and its two forms with decoupled weight decay."""

from __future__ import annotations

import math

from karvan.embedding.optim.base import Group, SparseOptimizer, Targets, limits
from karvan.store import Rule


class Adam(SparseOptimizer):
    """Adam: p -= alpha · m / (sqrt(v) + eps), where m and v are running means of g and g².

    alpha = lr · sqrt(1 - beta2^t) / (1 - beta1^t), where t counts the table's steps, as in
    torch.optim.SparseAdam. Moments of rows without a gradient do not change.

    Args:
        params: An engine, a module with engines in it, a table, or param groups like torch's. Without it,
            call `attach` later; a Trainer does.
        lr: The learning rate.
        betas: How much of the old m and v is kept in each step.
        eps: Is added to the root.
        weight_decay: Its product with p is added to g.
        amsgrad: Whether to divide by the root of the largest v that the row has had (Reddi, Kale, Kumar
            2018). It takes one more number for each of the vector.
        clip_value: The largest absolute value of an element of a key's summed gradient.
        clip_norm: The largest L2 norm of a key's summed gradient; it applies after `clip_value`.
        weight_bound: The largest absolute value of an element of a vector after the update.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> optimizer = kv.optim.Adam(lr=1e-3)  # sparse_optimizer of a Trainer
        >>> optimizer.attached
        False
    """

    def __init__(
        self,
        params: Targets | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        weight_bound: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults | limits(clip_value, clip_norm, weight_bound))

    def check_group(self, group: Group) -> None:
        """Raise if `eps` is 0."""
        if not group["eps"] > 0:
            raise ValueError(
                f"Adam divides a gradient of 0 by eps, so it must be above 0, got {group['eps']}."
            )

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "adam" or "amsgrad"."""
        rule = self._moments("adam", group, step)
        rule.weight_decay = group["weight_decay"]
        return rule

    def _moments(self, kind: str, group: Group, step: int) -> Rule:
        rule = Rule("amsgrad" if group["amsgrad"] else kind)
        rule.beta1, rule.beta2 = group["betas"]
        rule.eps = group["eps"]
        rule.alpha = float(group["lr"]) * math.sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
        return rule

    def state_kind(self, group: Group) -> str:
        """Return "adam" or "amsgrad"."""
        return "AMSGrad" if group["amsgrad"] else "Adam"  # the moments mean the same in all three classes

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """Return moments of zeros."""
        return [0.0] * ((3 if group["amsgrad"] else 2) * dim)


class AdamW(Adam):
    """Adam with decoupled decay: p *= 1 - lr · weight_decay before the update (Loshchilov, Hutter 2019).

    Args:
        params: An engine, a module with engines in it, a table, or param groups like torch's. Without it,
            call `attach` later; a Trainer does.
        lr: The learning rate.
        betas: How much of the old m and v is kept in each step.
        eps: Is added to the root.
        weight_decay: By how much rows with a gradient shrink, times the learning rate.
        amsgrad: Whether to divide by the root of the largest v that the row has had.
        clip_value: The largest absolute value of an element of a key's summed gradient.
        clip_norm: The largest L2 norm of a key's summed gradient; it applies after `clip_value`.
        weight_bound: The largest absolute value of an element of a vector after the update.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> optimizer = kv.optim.AdamW(lr=1e-3, weight_decay=0.05)
    """

    def __init__(
        self,
        params: Targets | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        amsgrad: bool = False,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        weight_bound: float | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad=amsgrad,
            clip_value=clip_value,
            clip_norm=clip_norm,
            weight_bound=weight_bound,
        )

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "adamw", or "amsgrad" with decay."""
        rule = self._moments("adamw", group, step)
        rule.shrink = 1 - self._decay(group)
        return rule

    def _decay(self, group: Group) -> float:
        return float(group["lr"]) * float(group["weight_decay"])


class AdamWTF(AdamW):
    """AdamW as in TensorFlow and RecIS: p *= 1 - weight_decay, independent of the learning rate.

    Args:
        params: An engine, a module with engines in it, a table, or param groups like torch's. Without it,
            call `attach` later; a Trainer does.
        lr: The learning rate.
        betas: How much of the old m and v is kept in each step.
        eps: Is added to the root.
        weight_decay: By how much rows with a gradient shrink.
        amsgrad: Whether to divide by the root of the largest v that the row has had.
        clip_value: The largest absolute value of an element of a key's summed gradient.
        clip_norm: The largest L2 norm of a key's summed gradient; it applies after `clip_value`.
        weight_bound: The largest absolute value of an element of a vector after the update.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> optimizer = kv.optim.AdamWTF(lr=1e-3, weight_decay=1e-4)
    """

    def _decay(self, group: Group) -> float:
        return float(group["weight_decay"])
