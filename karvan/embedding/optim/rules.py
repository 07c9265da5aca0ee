"""The optimizers of tables."""

from __future__ import annotations

import math
from typing import Any

from karvan.embedding.optim.base import Group, SparseOptimizer, Targets, settings_of
from karvan.store import Rule

# Stochastic gradient descent, with or without momentum.


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
        super().__init__(params, settings_of(locals()))

    def check_group(self, group: Group) -> None:
        """Raise if `nesterov` lacks a momentum."""
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("SGD with nesterov=True expects a momentum above 0, got 0.")

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "sgd", "momentum" or "nesterov"."""
        kind = ("nesterov" if group["nesterov"] else "momentum") if group["momentum"] else "sgd"
        return Rule(kind, beta1=group["momentum"], weight_decay=group["weight_decay"])

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """Return a momentum of zeros, or nothing."""
        return [0.0] * dim if group["momentum"] else []


# Adagrad (Duchi, Hazan, Singer: Adaptive subgradient methods, 2011), by element or by row.


_LEAST_FOR_LAST = 1e-6  # the first step of a row is then at most lr * 1000 * g


class Adagrad(SparseOptimizer):
    """Adagrad: p -= lr · g / (sqrt(a) + eps), where a sums g².

    It is the usual choice for rows: frequent keys get a smaller learning rate.

    Args:
        params: An engine, a module with engines in it, a table, or param groups like torch's. Without it,
            call `attach` later; a Trainer does.
        lr: The learning rate.
        lr_decay: Divides the learning rate of a table's step t by 1 + (t - 1) · lr_decay, as in torch.
        eps: Is added to the root.
        initial_accumulator_value: The a of a new row.
        weight_decay: Its product with p is added to g.
        decay: Multiplies a before each addition.
        row_wise: Whether a row has a single a, the sum of its mean g². It takes less memory and is nearly as
            good.
        accumulate: "first" adds g² to a before the update, as torch does. "last" uses the old a, as PERSIA
            does; initial_accumulator_value must then be at least 1e-6.
        clip_value: The largest absolute value of an element of a key's summed gradient.
        clip_norm: The largest L2 norm of a key's summed gradient; it applies after `clip_value`.
        weight_bound: The largest absolute value of an element of a vector after the update.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> optimizer = kv.optim.Adagrad(engine, lr=0.05, row_wise=True)
        >>> engine({"user": torch.tensor([7])})["user"].sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Targets | None = None,
        lr: float = 0.01,
        *,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        weight_decay: float = 0.0,
        decay: float = 1.0,
        row_wise: bool = False,
        accumulate: str = "first",
        clip_value: float | None = None,
        clip_norm: float | None = None,
        weight_bound: float | None = None,
    ) -> None:
        super().__init__(params, settings_of(locals()))

    def check_group(self, group: Group) -> None:
        """Raise if the first gradient of a row would be divided by 0."""
        if group["accumulate"] not in ("first", "last"):
            raise ValueError(f"accumulate must be 'first' or 'last', got '{group['accumulate']}'.")
        initial = group["initial_accumulator_value"]
        if group["accumulate"] == "last" and initial < _LEAST_FOR_LAST:
            raise ValueError(
                "Adagrad with accumulate='last' divides the first gradient of a row by the square root of "
                f"initial_accumulator_value, so it must be at least {_LEAST_FOR_LAST:g}, got {initial:g}: "
                "pass one, such as initial_accumulator_value=0.1, or use accumulate='first'."
            )
        if initial > 0:
            return
        if not group["eps"] > 0:
            raise ValueError(
                "Adagrad with eps=0 and initial_accumulator_value=0 divides a gradient of 0 by 0: expected "
                "one of them above 0."
            )

    def state_kind(self, group: Group) -> str:
        """Return "adagrad" or the kind with one number a row."""
        return "Adagrad by row" if group["row_wise"] else "Adagrad"

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "adagrad" or "adagrad_row"."""
        return Rule(
            "adagrad_row" if group["row_wise"] else "adagrad",
            beta1=group["decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            accumulate_last=group["accumulate"] == "last",
        )

    def rate(self, group: Group, step: int) -> float:
        """Return the learning rate after `lr_decay`."""
        return float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"]))

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """Return the initial accumulator."""
        return [group["initial_accumulator_value"]] * (1 if group["row_wise"] else dim)


# Adam (Kingma, Ba 2015) on the rows that have a gradient, and its two forms with decoupled weight decay.


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
        super().__init__(params, settings_of(locals()))

    def check_group(self, group: Group) -> None:
        """Raise if `eps` is 0."""
        if not group["eps"] > 0:
            raise ValueError(
                f"Adam divides a gradient of 0 by eps, so it must be above 0, got {group['eps']}."
            )

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "adam" or "amsgrad"."""
        return self._moments("adam", group, step, weight_decay=group["weight_decay"])

    def _moments(self, kind: str, group: Group, step: int, **decay: Any) -> Rule:
        beta1, beta2 = group["betas"]
        alpha = float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        name = "amsgrad" if group["amsgrad"] else kind
        return Rule(name, beta1=beta1, beta2=beta2, eps=group["eps"], alpha=alpha, **decay)

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
        super().__init__(params, **settings_of(locals()))

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "adamw", or "amsgrad" with decay."""
        return self._moments("adamw", group, step, shrink=1 - self._decay(group))

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


# FTRL-proximal (McMahan et al.: Ad click prediction, 2013): sparse weights for logistic models.


class FTRL(SparseOptimizer):
    """FTRL-Proximal, whose L1 limit makes elements exactly 0.

    p = -shrink(z, l1) / ((beta + sqrt(n)) / lr + l2), where z += g - (sqrt(n + g²) - sqrt(n)) / lr · p, and n
    sums g². An element with |z| of at most l1 becomes 0.

    Args:
        params: An engine, a module with engines in it, a table, or param groups like torch's. Without it,
            call `attach` later; a Trainer does.
        lr: The learning rate.
        beta: Slows down the first steps of a row.
        l1: How strongly elements are pulled to 0.
        l2: How strongly elements are shrunk.
        initial_accumulator_value: The n of a new row.
        clip_value: The largest absolute value of an element of a key's summed gradient.
        clip_norm: The largest L2 norm of a key's summed gradient; it applies after `clip_value`.
        weight_bound: The largest absolute value of an element of a vector after the update.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> optimizer = kv.optim.FTRL(lr=0.1, l1=0.01)
    """

    def __init__(
        self,
        params: Targets | None = None,
        lr: float = 0.1,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator_value: float = 0.0,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        weight_bound: float | None = None,
    ) -> None:
        super().__init__(params, settings_of(locals()))

    def check_group(self, group: Group) -> None:
        """Raise if a gradient would be divided by 0."""
        if not group["lr"] > 0:
            raise ValueError(f"FTRL divides by lr, so it must be above 0, got {group['lr']}.")
        if not (group["beta"] > 0 or group["l2"] > 0 or group["initial_accumulator_value"] > 0):
            raise ValueError(
                "FTRL with beta=0, l2=0 and initial_accumulator_value=0 divides a gradient of 0 by 0: "
                "expected one of them above 0."
            )

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "ftrl"."""
        if not group["lr"] > 0:  # a scheduler may have changed it
            raise ValueError(
                f"FTRL divides by lr, but lr is {group['lr']} now: expected a scheduler that stays above 0."
            )
        return Rule("ftrl", beta1=group["beta"], l1=group["l1"], l2=group["l2"])

    def state_kind(self, group: Group) -> str:
        """Return "ftrl"."""
        return "FTRL"  # z and n mean the same in both

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """Return z and n of a new row."""
        return [0.0] * dim + [group["initial_accumulator_value"]] * dim


class FTRLTF(FTRL):
    """FTRL as in TensorFlow and ElasticDL: p = -shrink(z, l1) / (sqrt(n) / lr + 2 · l2).

    It differs from `FTRL` in its defaults, and in that l2 counts twice. TensorFlow's
    `l1_regularization_strength` and `l2_regularization_strength` are l1 and l2. Its `learning_rate_power` is
    -0.5 here, and there is no `l2_shrinkage_regularization_strength`.

    Args:
        params: An engine, a module with engines in it, a table, or param groups like torch's. Without it,
            call `attach` later; a Trainer does.
        lr: The learning rate.
        beta: Slows down the first steps of a row.
        l1: How strongly elements are pulled to 0.
        l2: How strongly elements are shrunk.
        initial_accumulator_value: The n of a new row.
        clip_value: The largest absolute value of an element of a key's summed gradient.
        clip_norm: The largest L2 norm of a key's summed gradient; it applies after `clip_value`.
        weight_bound: The largest absolute value of an element of a vector after the update.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> optimizer = kv.optim.FTRLTF(lr=0.001, l1=0.01)
    """

    def __init__(
        self,
        params: Targets | None = None,
        lr: float = 0.001,
        *,
        beta: float = 0.0,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator_value: float = 0.1,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        weight_bound: float | None = None,
    ) -> None:
        super().__init__(params, **settings_of(locals()))

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "ftrl" with TensorFlow's l2."""
        rule = super().rule(group, step)
        rule.l2 = 2 * group["l2"]
        return rule
