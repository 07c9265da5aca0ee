"""Defaults of PERSIA: `kv.presets.persia.table(8)`, `kv.presets.persia.adagrad(model)`.

| PERSIA | Karvan's default | here |
|---|---|---|
| `EmbeddingConfig(emb_initialization=(-0.01, 0.01))` | the same | the same |
| `EmbeddingConfig(admit_probability=p)`, drawn at every miss | `Always()` | `Probability(p, each=True)` |
| `EmbeddingConfig(weight_bound=10)` | none | 10 |
| Adagrad divides by the accumulator before the gradient | after it | before it |
| Adagrad(initial_accumulator_value=0.01) | 0 | 0.01 |

One number stays different: PERSIA's Adam corrects its first step as if it were the second one.
"""

from __future__ import annotations

from typing import Any

from karvan.argument_checks import publish
from karvan.embedding import Table, init
from karvan.embedding.admission import Always, Probability
from karvan.embedding.optim import SGD, Adagrad, Adam
from karvan.embedding.optim.base import Targets

__all__ = ["table", "adagrad", "adam", "sgd", "INITIAL_RANGE", "INITIAL_ACCUMULATOR", "WEIGHT_BOUND"]

INITIAL_RANGE = (-0.01, 0.01)
"""Between which the elements of a new row are."""

WEIGHT_BOUND = 10.0
"""The largest absolute value of an element."""

INITIAL_ACCUMULATOR = 1e-2
"""What the accumulators of Adagrad start with."""


def table(dim: int, name: str | None = None, *, admit_probability: float = 1.0, **options: Any) -> Table:
    """Make a `kv.Table` with the defaults of PERSIA.

    Rows start in ±0.01, and a key is admitted with a probability at every miss. A slot with
    `embedding_summation` has the default combiner; with `sqrt_scaling` also combiner="sqrtn". A raw slot has
    combiner="sequence", or "index" for distinct vectors, and length=`sample_fixed_size`.

    Args:
        dim: The number of elements of a vector.
        name: The name of the table; by default that of its feature.
        admit_probability: The probability with which a key gets a row at a miss.
        **options: Further arguments of `kv.Table`.

    Returns:
        The table.

    Raises:
        ValueError: There are both `admit` and `admit_probability`.

    Example:
        >>> table = kv.presets.persia.table(8, admit_probability=0.5)
        >>> table.admit
        Probability(p=0.5, each=True)
    """
    if "admit" not in options:
        options["admit"] = Always() if admit_probability == 1.0 else Probability(admit_probability, each=True)
    elif admit_probability != 1.0:
        raise ValueError(
            f"persia.table expects admit or admit_probability, got both: {options['admit']} and "
            f"{admit_probability}."
        )
    return Table(dim, name, **{"init": init.Uniform(*INITIAL_RANGE), **options})


def adagrad(params: Targets | None = None, lr: float = 1e-2, **options: Any) -> Adagrad:
    """Make a `kv.optim.Adagrad` with the defaults of PERSIA.

    It scales by the old accumulator, which starts with 0.01; elements stay within ±10. PERSIA's
    `g_square_momentum` is the option decay, and `vectorwise_shared` is row_wise.

    Args:
        params: What it trains, as of `kv.optim.Adagrad`.
        lr: The learning rate.
        **options: Further arguments of `kv.optim.Adagrad`.

    Returns:
        The optimizer.

    Example:
        >>> kv.presets.persia.adagrad(lr=0.02).defaults["accumulate"]
        'last'
    """
    usual = {
        "accumulate": "last",
        "initial_accumulator_value": INITIAL_ACCUMULATOR,
        "weight_bound": WEIGHT_BOUND,
    }
    return Adagrad(params, lr, **{**usual, **options})


def adam(params: Targets | None = None, lr: float = 1e-3, **options: Any) -> Adam:
    """Make a `kv.optim.Adam` that keeps elements within ±10, as PERSIA does.

    Args:
        params: What it trains, as of `kv.optim.Adam`.
        lr: The learning rate.
        **options: Further arguments of `kv.optim.Adam`.

    Returns:
        The optimizer.

    Example:
        >>> kv.presets.persia.adam().defaults["weight_bound"]
        10.0
    """
    return Adam(params, lr, **{"weight_bound": WEIGHT_BOUND, **options})


def sgd(params: Targets | None = None, lr: float = 1e-2, **options: Any) -> SGD:
    """Make a `kv.optim.SGD` that keeps elements within ±10, as PERSIA does.

    Momentum and weight_decay count here; PERSIA ignores them.

    Args:
        params: What it trains, as of `kv.optim.SGD`.
        lr: The learning rate.
        **options: Further arguments of `kv.optim.SGD`.

    Returns:
        The optimizer.

    Example:
        >>> kv.presets.persia.sgd().defaults["weight_bound"]
        10.0
    """
    return SGD(params, lr, **{"weight_bound": WEIGHT_BOUND, **options})


publish("karvan.presets.persia")
