"""`Embedding`: vectors of ids of any number, whose rows are on the parameter servers of a job.

`initialiser_of` has their initialisers by the names that Keras gives them, and `row_optimizer` gives rows the
optimizer of a model's dense parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from karvan.argument_checks import listed
from karvan.compat.elasticdl.contract import ContractError, table_name
from karvan.compat.unsupported import require_default
from karvan.embedding import EmbeddingEngine, Table, init, optim
from karvan.embedding.optim.base import SparseOptimizer
from karvan.ragged import Ragged, values_of

_NAMES: dict[str, init.Initialiser] = {
    "uniform": init.Uniform(-0.05, 0.05),
    "random_uniform": init.Uniform(-0.05, 0.05),
    "normal": init.Normal(0.0, 0.05),
    "random_normal": init.Normal(0.0, 0.05),
    "truncated_normal": init.TruncatedNormal(0.0, 0.05),
    "zeros": init.Constant(0.0),
    "ones": init.Constant(1.0),
}


def initialiser_of(initialiser: init.Initialiser | str) -> init.Initialiser:
    """An initialiser of kv.init, as it is or by a name."""
    if isinstance(initialiser, init.Initialiser):
        return initialiser
    if initialiser not in _NAMES:
        raise ContractError(
            f"There is no initialiser {initialiser!r}. Expected one of kv.init, or a name: "
            f"{listed(str(initialiser), _NAMES)}"
        )
    return _NAMES[initialiser]


_IDS = "ids of an Embedding"  # no column of a batch, which would be looked up in advance, has this name


class Embedding(nn.Module):
    """Vectors of `output_dim` numbers for ids, a tensor (samples,) or (samples, length), or a `kv.Ragged`.

    input_dim: ids are below it; 0 or None allows any. input_length: the length of every sample, if it is
    known. combiner: "sum", "mean" or "sqrtn" of the ids of a sample; without one the result is (samples,
    output_dim) or (samples, length, output_dim). name: of the table, the same in every worker and no other
    layer's; without one, layers are numbered.
    """

    def __init__(
        self,
        output_dim: int,
        input_dim: int | None = None,
        embeddings_initializer: init.Initialiser | str = "uniform",
        mask_zero: bool = False,
        input_length: int | None = None,
        combiner: str | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if combiner not in (None, "sum", "mean", "sqrtn"):
            raise ContractError(f"Embedding expects a combiner sum, mean or sqrtn, got '{combiner}'.")
        if isinstance(input_dim, str):
            raise ContractError(f"Embedding expects a number as input_dim, got '{input_dim}': write name=….")
        require_default(
            "mask_zero",
            mask_zero,
            False,
            "layers of torch have no masks; ToRagged(ignore_value=0) drops zeros.",
        )
        self.name = table_name("embedding", name)
        self._combiner = combiner
        self._limit = input_dim or None
        self._length = input_length
        first = initialiser_of(embeddings_initializer)
        table = Table(output_dim, name=self.name, combiner=combiner or "sum", init=first)
        self.engine = EmbeddingEngine({_IDS: table})

    def forward(self, ids: Tensor | Ragged) -> Tensor:
        """The vectors."""
        self._check(ids)
        if isinstance(ids, Ragged):
            return self._lookup(Ragged(ids.values.to(torch.int64), ids.offsets, ids.weights))
        flat = ids.reshape(-1).to(torch.int64)
        if self._combiner is None or ids.dim() == 1:
            return self._lookup(flat).reshape(*ids.shape, -1)
        offsets = torch.arange(len(ids) + 1, dtype=torch.int64, device=ids.device) * ids.shape[1]
        return self._lookup(Ragged(flat, offsets))

    def _lookup(self, ids: Tensor | Ragged) -> Tensor:
        vectors: Tensor = self.engine({_IDS: ids})[_IDS]
        return vectors

    def _check(self, ids: Tensor | Ragged) -> None:
        values = values_of(ids)
        plain = values.dim() == 1 if isinstance(ids, Ragged) else ids.dim() in (1, 2)
        if not plain or values.is_floating_point():
            raise ContractError(
                f"Embedding '{self.name}' expects whole numbers (samples,) or (samples, length), or a "
                f"kv.Ragged of them, got {tuple(values.shape)} {values.dtype}."
            )
        if isinstance(ids, Ragged) and self._combiner is None:
            raise ContractError(
                f"Embedding '{self.name}' expects a combiner for samples of several lengths, got none."
            )
        length = tuple(ids.shape[1:]) if isinstance(ids, Tensor) else None
        if self._length is not None and length != (self._length,):
            raise ContractError(
                f"Embedding '{self.name}' expects {self._length} ids a sample, as input_length says, got "
                f"{'several numbers' if length is None else (length[0] if length else 1)}."
            )
        if self._limit is not None and values.numel():
            low, high = (int(bound) for bound in torch.aminmax(values))
            if low < 0 or high >= self._limit:
                raise ContractError(
                    f"Embedding '{self.name}' expects ids from 0 to {self._limit - 1}, as input_dim says, "
                    f"got {low if low < 0 else high}."
                )


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
    torch.optim.AdamW: (optim.AdamW, ("lr", "betas", "eps", "weight_decay", "amsgrad"), {"maximize": False}),
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
            f"{', '.join(allowed.__name__ for allowed in _KINDS)}, got {kind.__name__}."
        )
    make, shared, fixed = _KINDS[kind]
    for name, value in fixed.items():
        if dense.defaults.get(name, value) != value:
            raise ContractError(
                f"Rows of embedding layers have no {name} in {kind.__name__}: expected {value}, got "
                f"{dense.defaults[name]}."
            )
    return make(**{name: dense.defaults[name] for name in shared})
