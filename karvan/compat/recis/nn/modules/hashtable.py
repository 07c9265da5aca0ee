"""`HashTable`: a table of its own, and views of the tables of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from karvan.compat.recis.connection import connect_ranks, shared_seed, table_device
from karvan.compat.recis.nn.hashtable_hook import AdmitHook, FilterHook, eviction
from karvan.compat.recis.nn.initializers import ConstantInitializer, Initializer
from karvan.compat.unsupported import UnsupportedError, missing_names, require_default
from karvan.embedding import EmbeddingEngine, Table, TableHandle
from karvan.embedding.eviction import Never
from karvan.store import Rows

filtered: WeakSet[TableHandle] = WeakSet()
"""The tables with a FilterHook, which HashTableFilterHook filters."""


class SparseParameter:
    """The rows of one table, as `filter_out_sparse_param` gives them to optimizers."""

    def __init__(self, engine: EmbeddingEngine, handle: TableHandle) -> None:
        self.engine = engine
        self.handle = handle

    def insert(self, ids: Tensor, embeddings: Tensor) -> None:
        """Insert or overwrite rows; their optimizer state is new. Each rank keeps what it owns."""
        handle = self.handle
        state = np.tile(np.asarray(handle.initial_state, dtype=np.float32), (len(ids), 1))
        keys, vectors = ids.cpu().numpy(), embeddings.detach().to("cpu", torch.float32).numpy()
        steps = np.full(len(ids), handle.engine_state.step, dtype=np.uint32)
        handle.load(Rows(keys, vectors, state, np.ones(len(ids), dtype=np.uint32), steps))

    def ids(self, child: str | None = None) -> Tensor:
        """All ids that have rows in this process."""
        self._check(child)
        return self.handle.keys()

    def embeddings(self, child: str | None = None) -> Tensor:
        """Their vectors, in the order of `ids`."""
        return self.ids_embeddings(child)[1]

    def ids_embeddings(self, child: str | None = None) -> tuple[Tensor, Tensor]:
        """Ids and vectors."""
        self._check(child)
        rows = self.handle.snapshot()
        return torch.from_numpy(rows.keys), torch.from_numpy(rows.vectors)

    def clear(self, child: str | None = None) -> None:
        """Remove all rows."""
        self._check(child)
        self.handle.clear()

    def reset(self) -> None:
        """Remove all rows."""
        self.handle.clear()

    def _check(self, child: str | None) -> None:
        if child not in (None, self.handle.name):
            raise ValueError(f"Table '{self.handle.name}' has no child '{child}': tables are never merged.")

    def __repr__(self) -> str:
        return f"HashTable_{self.handle.name}"


class HashTable(nn.Module, SparseParameter):
    """A table that is looked up by itself: `HashTable([16], name="user")(ids)` is (n, 16)."""

    def __init__(
        self,
        embedding_shape: Sequence[int],
        block_size: int = 5,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        coalesced: bool = False,
        children: Sequence[str] | None = None,
        slice: Any = None,
        initializer: Initializer | None = None,
        name: str = "hashtable",
        grad_reduce_by: str = "worker",
        filter_hook: FilterHook | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if len(embedding_shape) != 1:
            raise UnsupportedError(
                f"embedding_shape={list(embedding_shape)}", "expected one dimension, [dim]."
            )
        require_default("slice", slice, None, "ranks divide the ids by themselves.")
        require_unmerged(name, coalesced, children)
        (dim,) = embedding_shape
        connect_ranks(grad_reduce_by, device)
        table = Table(
            dim,
            name,
            dtype=dtype,
            init=(initializer or ConstantInitializer()).native(dim, block_size),
            evict=eviction(filter_hook),
            device=table_device(device),
        )
        engine = make_engine({"ids": table})
        SparseParameter.__init__(self, engine, engine.table(name))

    def forward(self, ids: Tensor, admit_hook: AdmitHook | None = None) -> Tensor:
        """The vectors of ids; a training forward inserts those without a row, unless a hook says no."""
        if admit_hook is not None and torch.is_grad_enabled() and self.training:
            raise UnsupportedError(
                "HashTable(ids, admit_hook) in training",
                'use EmbeddingOption(admit_hook=AdmitHook("ReadOnly")), or torch.no_grad().',
            )
        vectors: Tensor = self.engine({"ids": ids})["ids"]
        return vectors

    def __repr__(self) -> str:
        return SparseParameter.__repr__(self)


def make_engine(features: dict[str, Table]) -> EmbeddingEngine:
    """An engine of Karvan; its tables with filters are noted."""
    engine = EmbeddingEngine(features, seed=shared_seed())
    for feature, table in features.items():
        if not isinstance(table.evict, Never):
            filtered.add(engine.table(table.name or feature))
    return engine


def require_unmerged(name: str, coalesced: bool | None, children: Sequence[str] | None) -> None:
    """Raise if tables are to be merged into one."""
    instead = "Karvan looks up all tables of an engine together without it."
    require_default("coalesced", bool(coalesced), False, instead)
    require_default("children", list(children or [name]), [name], instead)


def filter_out_sparse_param(model: nn.Module) -> dict[str, SparseParameter]:
    """The tables of a model by name, for a sparse optimizer."""
    engines = [module for module in model.modules() if isinstance(module, EmbeddingEngine)]
    return {handle.name: SparseParameter(engine, handle) for engine in engines for handle in engine.tables()}


def handles_of(param_dict: Mapping[str, SparseParameter]) -> list[TableHandle]:
    """The tables that an optimizer is given."""
    if not isinstance(param_dict, Mapping):
        raise TypeError(
            "A sparse optimizer expects what filter_out_sparse_param(model) gives, got "
            f"{type(param_dict).__name__}."
        )
    return [each.handle for each in param_dict.values()]


def engines_of(tables: Mapping[str, SparseParameter]) -> list[EmbeddingEngine]:
    """The engines of some tables, each once; an error unless all tables of them are given."""
    engines = list({id(each.engine): each.engine for each in tables.values()}.values())
    given = {each.handle.name for each in tables.values()}
    for handle in (handle for engine in engines for handle in engine.tables()):
        if handle.name not in given:
            raise UnsupportedError(
                f"a checkpoint without table '{handle.name}'", "give all tables of a model."
            )
    return engines


__getattr__ = missing_names(
    "recis.nn.modules.hashtable",
    {
        **dict.fromkeys(("Slice", "gen_slice"), "ranks divide the ids by themselves."),
        "split_sparse_dense_state_dict": "rows are not in a state_dict: use filter_out_sparse_param(model).",
        "HashtableRegister": "use filter_out_sparse_param(model).",
        "filter_out_trainable_sparse_param": "use filter_out_sparse_param(model).",
    },
)
