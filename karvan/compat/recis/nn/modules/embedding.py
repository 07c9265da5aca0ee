"""`EmbeddingOption`, the declaration of a feature's embedding, and `DynamicEmbedding`, one feature's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from karvan.compat.recis.connection import connect_ranks, table_device
from karvan.compat.recis.nn.hashtable_hook import AdmitHook, FilterHook, admission, eviction
from karvan.compat.recis.nn.initializers import ConstantInitializer, Initializer
from karvan.compat.recis.nn.modules.hashtable import make_engine, require_unmerged
from karvan.compat.recis.ragged.tensor import to_karvan
from karvan.compat.unsupported import UnsupportedError, require_default
from karvan.embedding import Table
from karvan.presets import recis
from karvan.ragged import IndexedRows, Ragged

_COMBINERS = ("sum", "mean", "tile")
_LATER = {
    "hdmp_group_size": None,
    "hdmp_group_reduce_by": None,
    "fp16_enabled": False,
    "pg": None,
    "max_partition_num": 65536,
}


@dataclass
class EmbeddingOption:
    """How a feature is embedded; `table()` is the same as a `kv.Table`.

    Features with one shared_name share rows. trainable=False: its vectors get no gradient. block_size is a
    fan of Xavier and Kaiming initializers; memory is allocated without it. "tile" has the first `tile_len`
    vectors side by side, without weights. no_reduce gives a `NoReduceEmbedding`, whatever the combiner.
    """

    embedding_dim: int = 16
    block_size: int = 10240
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    trainable: bool = True
    pg: Any = None
    max_partition_num: int = 65536
    shared_name: str = "embedding"
    children: list[str] = field(default_factory=list)
    coalesced: bool | None = False
    initializer: Initializer | None = None
    use_weight: bool | None = True
    combiner: str | None = "sum"
    combiner_kwargs: Mapping[str, Any] | None = None
    grad_reduce_by: str | None = "worker"
    hdmp_group_size: int | None = None
    hdmp_group_reduce_by: str | None = None
    filter_hook: FilterHook | None = None
    admit_hook: AdmitHook | None = None
    fp16_enabled: bool = False
    no_reduce: bool = False

    def __post_init__(self) -> None:
        for name, default in _LATER.items():
            require_default(f"EmbeddingOption {name}", getattr(self, name), default, "leave it out.")
        require_unmerged(self.shared_name, self.coalesced, self.children)
        if self.no_reduce:
            return
        if self.combiner not in _COMBINERS:
            raise UnsupportedError(f"combiner {self.combiner!r}", f"expected one of {', '.join(_COMBINERS)}.")
        if self.combiner == "tile" and "tile_len" not in (self.combiner_kwargs or {}):
            raise ValueError('combiner "tile" expects combiner_kwargs={"tile_len": n}.')
        known = {"tile_len"} if self.combiner == "tile" else set()
        if unknown := set(self.combiner_kwargs or {}) - known:
            raise UnsupportedError(f"combiner_kwargs {sorted(unknown)}", "leave them out.")

    def table(self) -> Table:
        """Karvan's declaration."""
        made = self.initializer or ConstantInitializer()
        tiled = self.combiner == "tile" and not self.no_reduce
        return recis.table(
            self.embedding_dim,
            self.shared_name,
            combiner="index" if self.no_reduce else str(self.combiner),
            length=int((self.combiner_kwargs or {})["tile_len"]) if tiled else None,
            use_weights=bool(self.use_weight) and not tiled,
            dtype=self.dtype,
            init=made.native(self.embedding_dim, self.block_size),
            admit=admission(self.admit_hook),
            evict=eviction(self.filter_hook),
            device=table_device(self.device),
            missing="empty",
        )


@dataclass
class NoReduceEmbedding:
    """The vectors of a batch's distinct ids: those of all its ids are `emb[reverse_index]`.

    `offsets` are those of the rows. Weights of ids are not in it.
    """

    emb: Tensor
    reverse_index: Tensor
    offsets: Tensor


class DynamicEmbedding(nn.Module):
    """The embedding of one feature: `DynamicEmbedding(option)(ids)`."""

    def __init__(self, emb_opt: EmbeddingOption, pg: Any = None) -> None:
        super().__init__()
        require_default("pg", pg, None, "Karvan uses the ranks of torch's default group.")
        connect_ranks(emb_opt.grad_reduce_by or "worker", emb_opt.device)
        self._option = emb_opt
        self.engine = make_engine({"ids": emb_opt.table()})

    def forward(self, ids: Any, input_weights: Tensor | None = None) -> Tensor | NoReduceEmbedding:
        """The vectors of ids, a tensor or a RaggedTensor; input_weights are those of the ids of a tensor."""
        if input_weights is not None:
            if not isinstance(ids, Tensor) or ids.shape != input_weights.shape or ids.dim() != 2:
                raise ValueError(
                    f"input_weights expects ids as a tensor of rows, and a weight for each, got {type(ids)} "
                    f"and {tuple(input_weights.shape)}: a RaggedTensor has weights of its own."
                )
            rows = torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1]
            ids = Ragged(ids.flatten(), rows, input_weights.flatten())
        out = self.engine({"ids": to_karvan(ids)})["ids"]
        return as_vectors("ids", out, self._option.trainable)


def as_vectors(name: str, out: Tensor | Ragged | IndexedRows, trainable: bool) -> Tensor | NoReduceEmbedding:
    """The vectors of a feature; those of lists of lists as (rows, lists, dim)."""
    if isinstance(out, IndexedRows):
        vectors = out.vectors[1:]  # without those of padding
        offsets = torch.cat([out.index.new_zeros(1), out.lengths().cumsum(0)])
        return NoReduceEmbedding(vectors if trainable else vectors.detach(), out.index[out.mask] - 1, offsets)
    if isinstance(out, Ragged):
        lengths = out.lengths()
        count = int(lengths[0]) if out.rows else 0
        if not bool((lengths == count).all()):
            raise ValueError(
                f"Feature '{name}' expects equally many lists in all rows, got {int(lengths.min())} to "
                f"{int(lengths.max())}: SequenceTruncate(n_dims=3) cuts and fills rows."
            )
        out = out.values.reshape(out.rows, count, out.values.shape[-1])
    return out if trainable else out.detach()
