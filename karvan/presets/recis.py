"""Defaults of RecIS: `kv.presets.recis.table(16)`.

| RecIS | Karvan's default | here |
|---|---|---|
| new rows are zero | ±0.01 | `Constant(0)` |
| a weighted `mean` divides by Σw, in dense batches by the number of ids | by Σw | `"mean_by_density"` |
| `tile` ignores weights | multiplies by them | `use_weights=False` |
| Xavier's fans are those of a block of 10,240 rows | both are dim | `xavier_uniform()`, `xavier_normal()` |
| `TruncNormal` is cut at ±2 | at two standard deviations | `truncated_normal()` |
| `GlobalStepFilter` removes rows unused for `filter_step` steps | for more | `global_step_filter()` |

The optimizers need no preset: the formulas of `kv.optim.Adam`, `AdamW` and `AdamWTF` are those of RecIS's
`SparseAdam`, `SparseAdamW` and `SparseAdamWTF`.
"""

from __future__ import annotations

from typing import Any

from karvan.argument_checks import publish
from karvan.embedding import Table
from karvan.embedding.eviction import Age
from karvan.embedding.init import Constant, TruncatedNormal, XavierNormal, XavierUniform

__all__ = ["table", "global_step_filter", "truncated_normal", "xavier_uniform", "xavier_normal"]

_BLOCK = 10240  # rows that RecIS initialises together


def table(dim: int = 16, name: str | None = None, *, combiner: str = "sum", **options: Any) -> Table:
    """Make a `kv.Table` with the defaults of RecIS 1.0.

    Rows start as zeros; "mean" and "tile" treat weights as in RecIS 1.0. In later versions of RecIS a mean
    always divides by the sum of weights, as combiner="mean" of `kv.Table` does.

    Args:
        dim: The number of elements of a vector.
        name: The name of the table; by default that of its feature.
        combiner: How the vectors of a sample's ids are combined.
        **options: Further arguments of `kv.Table`.

    Returns:
        The table.

    Example:
        >>> kv.presets.recis.table(16, combiner="mean").combiner
        'mean_by_density'
    """
    usual: dict[str, Any] = {"init": Constant(0.0), "use_weights": combiner != "tile"}
    if combiner == "mean":
        combiner = "mean_by_density"
    return Table(dim, name, combiner, **{**usual, **options})


def xavier_uniform(gain: float = 1.0, block_size: int = _BLOCK) -> XavierUniform:
    """Make an initialiser with the range of RecIS, which starts blocks of rows together.

    Args:
        gain: Widens the range.
        block_size: The rows of a block.

    Returns:
        The initialiser.

    Example:
        >>> kv.presets.recis.xavier_uniform().fan_out
        10240
    """
    return XavierUniform(gain, fan_out=block_size)


def xavier_normal(gain: float = 1.0, block_size: int = _BLOCK) -> XavierNormal:
    """Make an initialiser with the deviation of RecIS, which starts blocks of rows together.

    Args:
        gain: Widens the distribution.
        block_size: The rows of a block.

    Returns:
        The initialiser.

    Example:
        >>> kv.presets.recis.xavier_normal().fan_out
        10240
    """
    return XavierNormal(gain, fan_out=block_size)


def truncated_normal(
    mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0
) -> TruncatedNormal:
    """Make a truncated normal initialiser between absolute bounds, as RecIS does.

    Args:
        mean: The mean.
        std: The standard deviation.
        low: The lowest value.
        high: The highest value.

    Returns:
        The initialiser.

    Example:
        >>> kv.presets.recis.truncated_normal(std=0.02).high
        2.0
    """
    return TruncatedNormal(mean, std, low, high)


def global_step_filter(filter_step: int, every: int = 100) -> Age:
    """Make the eviction policy that keeps the rows of the last `filter_step` steps.

    Args:
        filter_step: How many steps.
        every: How many steps are between two checks.

    Returns:
        The policy.

    Raises:
        ValueError: `filter_step` is below 1.

    Example:
        >>> policy = kv.presets.recis.global_step_filter(1000)
    """
    if filter_step < 1:
        raise ValueError(f"global_step_filter expects a filter_step of at least 1, got {filter_step}.")
    return Age(filter_step - 1, every)


publish("karvan.presets.recis")
