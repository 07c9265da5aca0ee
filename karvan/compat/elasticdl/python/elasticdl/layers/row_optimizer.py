"""`row_optimizer`: the optimizer of a model's dense parameters, for the rows of its embedding layers."""

from __future__ import annotations

from typing import Any

import torch

from karvan.compat.elasticdl.contract import ContractError
from karvan.embedding import optim
from karvan.embedding.optim.base import SparseOptimizer

# The optimizer of rows, the options that both have, and the only values of options that rows do not have.
_KINDS: dict[type, tuple[type[SparseOptimizer], tuple[str, ...], dict[str, Any]]] = {
    torch.optim.SGD: (
        optim.SGD,
        ("lr", "momentum", "weight_decay", "nesterov"),
        {"dampening": 0, "maximize": False},
    ),
    torch.optim.Adam: (
        optim.Adam,
        ("lr", "betas", "eps", "weight_decay", "amsgrad"),
        {"maximize": False, "decoupled_weight_decay": False},
    ),
    torch.optim.AdamW: (
        optim.AdamW,
        ("lr", "betas", "eps", "weight_decay", "amsgrad"),
        {"maximize": False},
    ),
    torch.optim.Adagrad: (
        optim.Adagrad,
        ("lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay"),
        {"maximize": False},
    ),
}


def row_optimizer(dense: torch.optim.Optimizer) -> SparseOptimizer:
    """The same optimizer for rows, with the same options; an error if rows have none like it."""
    kind = type(dense)
    if kind not in _KINDS:
        raise ContractError(
            f"Rows of embedding layers are trained by the model's optimizer, one of "
            f"{', '.join(each.__name__ for each in _KINDS)}, got {kind.__name__}."
        )
    make, shared, fixed = _KINDS[kind]
    for name, value in fixed.items():
        if dense.defaults.get(name, value) != value:
            raise ContractError(
                f"Rows of embedding layers have no {name} in {kind.__name__}: expected {value}, got "
                f"{dense.defaults[name]}."
            )
    return make(**{name: dense.defaults[name] for name in shared})
