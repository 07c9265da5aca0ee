"""Adagrad (Duchi, Hazan, Singer: Adaptive subgradient methods, 2011), by element or by row."""

from __future__ import annotations

from karvan.embedding.optim.base import Group, SparseOptimizer, Targets, limits
from karvan.store import Rule

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
        rule = Rule("adagrad_row" if group["row_wise"] else "adagrad")
        rule.beta1 = group["decay"]
        rule.eps = group["eps"]
        rule.weight_decay = group["weight_decay"]
        rule.accumulate_last = group["accumulate"] == "last"
        return rule

    def rate(self, group: Group, step: int) -> float:
        """Return the learning rate after `lr_decay`."""
        return super().rate(group, step) / (1 + (step - 1) * float(group["lr_decay"]))

    def initial_state(self, group: Group, dim: int) -> list[float]:
        """Return the initial accumulator."""
        return [group["initial_accumulator_value"]] * (1 if group["row_wise"] else dim)
