"""Adagrad (Duchi, Hazan, Singer: Adaptive subgradient methods, 2011), by element or by row."""

from __future__ import annotations

from karvan.embedding.optim.base import Group, SparseOptimizer, Targets, limits
from karvan.store import Rule

_LEAST_FOR_LAST = 1e-6  # the first step of a row is then at most lr * 1000 * g


class Adagrad(SparseOptimizer):
    """p -= lr * g / (sqrt(a) + eps), where a sums g².

    accumulate: "first" adds g² to a before the update, as torch does; "last" scales by the old a, as PERSIA
    does, which needs an initial_accumulator_value of at least 1e-6. decay multiplies a before each addition.
    lr_decay divides the learning rate of a table's step t by 1 + (t - 1) * lr_decay, as torch does.
    row_wise has a single a for each row, the sum of its mean g²: less memory, nearly as good. weight_decay *
    p is added to g.
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
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
            "weight_decay": weight_decay,
            "decay": decay,
            "row_wise": row_wise,
            "accumulate": accumulate,
        }
        super().__init__(params, defaults | limits(clip_value, clip_norm, weight_bound))

    def check_group(self, group: Group) -> None:
        """See `SparseOptimizer.check_group`."""
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
        """See `SparseOptimizer.state_kind`."""
        return "Adagrad by row" if group["row_wise"] else "Adagrad"

    def rule(self, group: Group, step: int) -> Rule:
        """See `SparseOptimizer.rule`."""
        rule = Rule("adagrad_row" if group["row_wise"] else "adagrad")
        rule.beta1 = group["decay"]
        rule.eps = group["eps"]
        rule.weight_decay = group["weight_decay"]
        rule.accumulate_last = group["accumulate"] == "last"
        return rule

    def rate(self, group: Group, step: int) -> float:
        """See `SparseOptimizer.rate`."""
        return super().rate(group, step) / (1 + (step - 1) * float(group["lr_decay"]))

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """See `SparseOptimizer.initial_state`."""
        return [group["initial_accumulator_value"]] * (1 if group["row_wise"] else dim)
