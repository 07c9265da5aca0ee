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

from karvan.embedding import Table
from karvan.embedding.eviction import Age
from karvan.embedding.init import Constant, TruncatedNormal, XavierNormal, XavierUniform
from karvan.public_names import publish

__all__ = ["global_step_filter", "table", "truncated_normal", "xavier_normal", "xavier_uniform"]

_BLOCK = 10240  # rows that RecIS initialises together


def table(dim: int = 16, name: str | None = None, *, combiner: str = "sum", **options: Any) -> Table:
    """A `kv.Table` whose rows start as zeros; "mean" and "tile" treat weights as in RecIS 1.0.

    In later versions of RecIS a mean always divides by Σw, as combiner="mean" of `kv.Table` does.
    """
    usual: dict[str, Any] = {"init": Constant(0.0), "use_weights": combiner != "tile"}
    if combiner == "mean":
        combiner = "mean_by_density"
    return Table(dim, name, combiner, **{**usual, **options})


def xavier_uniform(gain: float = 1.0, block_size: int = _BLOCK) -> XavierUniform:
    """`XavierUniform` over blocks of rows: ±0.024 for rows of 16 values."""
    return XavierUniform(gain, fan_out=block_size)


def xavier_normal(gain: float = 1.0, block_size: int = _BLOCK) -> XavierNormal:
    """`XavierNormal` over blocks of rows."""
    return XavierNormal(gain, fan_out=block_size)


def truncated_normal(
    mean: float = 0.0, std: float = 1.0, low: float = -2.0, high: float = 2.0
) -> TruncatedNormal:
    """`TruncatedNormal` between absolute bounds."""
    return TruncatedNormal(mean, std, low, high)


def global_step_filter(filter_step: int, every: int = 100) -> Age:
    """`Age` that keeps the rows of the last `filter_step` steps; checked every `every` steps."""
    if filter_step < 1:
        raise ValueError(f"global_step_filter expects a filter_step of at least 1, got {filter_step}.")
    return Age(filter_step - 1, every)


publish("karvan.presets.recis")
