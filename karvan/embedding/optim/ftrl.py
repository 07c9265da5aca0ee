"""FTRL-proximal (McMahan et al.: Ad click prediction, 2013): sparse weights for logistic models."""

from __future__ import annotations

from karvan.embedding.optim.base import Group, SparseOptimizer, Targets, limits
from karvan.store import Rule


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
        defaults = {
            "lr": lr,
            "beta": beta,
            "l1": l1,
            "l2": l2,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults | limits(clip_value, clip_norm, weight_bound))

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
                f"FTRL divides by lr, which is {group['lr']} now: expected a scheduler that stays above 0."
            )
        rule = Rule("ftrl")
        rule.beta1 = group["beta"]
        rule.l1 = group["l1"]
        rule.l2 = group["l2"]
        return rule

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
        super().__init__(
            params,
            lr,
            beta=beta,
            l1=l1,
            l2=l2,
            initial_accumulator_value=initial_accumulator_value,
            clip_value=clip_value,
            clip_norm=clip_norm,
            weight_bound=weight_bound,
        )

    def rule(self, group: Group, step: int) -> Rule:
        """Return the rule "ftrl" with TensorFlow's l2."""
        rule = super().rule(group, step)
        rule.l2 = 2 * group["l2"]
        return rule
