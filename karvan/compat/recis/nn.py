"""Embeddings of features, over `kv.EmbeddingEngine`: declarations, tables, and where the rows are.

Initializers say how rows begin, hooks of tables which ids get rows and which are removed. The values of a row
are a function of the seed of `torch.manual_seed`, the table's name and the id, not of the order in which ids
arrive. So a `generator` is not taken. Fans are those of RecIS, which initialises blocks of rows: that of
`EmbeddingOption(block_size=…)` is the other fan of Xavier and Kaiming.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.init import calculate_gain
from typing_extensions import override

from karvan import distributed
from karvan.compat.cuda_fallback import device_of
from karvan.compat.recis.ragged import RaggedTensor, to_karvan
from karvan.compat.unsupported import UnsupportedError, require_default, require_defaults
from karvan.embedding import EmbeddingEngine as Engine
from karvan.embedding import Table, TableHandle, init
from karvan.embedding.admission import Admission, Always, ReadOnly
from karvan.embedding.eviction import Eviction, Never
from karvan.presets import recis
from karvan.ragged import IndexedRows, Ragged
from karvan.store import Rows

__all__ = ["DynamicEmbedding", "EmbeddingEngine", "EmbeddingOption", "HashTable", "NoReduceEmbedding"]


@dataclass(frozen=True)
class Initializer:
    """The distribution of new rows' values; `make` gives Karvan's for the fields, or for `settings`."""

    make: ClassVar[Callable[..., init.Initialiser]]

    def native(self, dim: int, block_size: int) -> init.Initialiser:
        """Karvan's initialiser for rows of so many values."""
        generator = getattr(self, "generator", None)
        require_default("generator", generator, None, "call torch.manual_seed before the model is made.")
        return self.make(*self.settings(dim, block_size))

    def settings(self, dim: int, block_size: int) -> Sequence[Any]:
        """The arguments of `make`."""
        return [value for name, value in vars(self).items() if name != "generator"]


@dataclass(frozen=True)
class ConstantInitializer(Initializer):
    """Every value the same."""

    make = init.Constant
    init_val: float = 0.0


@dataclass(frozen=True)
class UniformInitializer(Initializer):
    """Uniform from a to b."""

    make = init.Uniform
    a: float = 0.0
    b: float = 1.0
    generator: Any = None


@dataclass(frozen=True)
class NormalInitializer(Initializer):
    """Normal."""

    make = init.Normal
    mean: float = 0.0
    std: float = 1.0
    generator: Any = None


@dataclass(frozen=True)
class TruncNormalInitializer(Initializer):
    """Normal without the values outside of [a, b], which are values, not standard deviations."""

    make = staticmethod(recis.truncated_normal)
    mean: float = 0.0
    std: float = 1.0
    a: float = -2.0
    b: float = 2.0
    generator: Any = None


@dataclass(frozen=True)
class _Xavier(Initializer):
    gain: float = 1.0
    generator: Any = None

    @override
    def settings(self, dim: int, block_size: int) -> Sequence[Any]:
        return self.gain, block_size


class XavierUniformInitializer(_Xavier):
    """Uniform, by the fans of a block."""

    make = staticmethod(recis.xavier_uniform)


class XavierNormalInitializer(_Xavier):
    """Normal, by the fans of a block."""

    make = staticmethod(recis.xavier_normal)


@dataclass(frozen=True)
class _Kaiming(Initializer):
    a: float = 0.0
    mode: str = "fan_in"
    nonlinearity: str = "leaky_relu"
    generator: Any = None

    @override
    def settings(self, dim: int, block_size: int) -> Sequence[Any]:
        if self.mode not in ("fan_in", "fan_out"):
            raise ValueError(f"{type(self).__name__} expects mode 'fan_in' or 'fan_out', got {self.mode!r}.")
        gain = calculate_gain(self.nonlinearity, self.a)  # type: ignore[arg-type]
        return gain, dim if self.mode == "fan_in" else block_size


class KaimingUniformInitializer(_Kaiming):
    """Uniform, by one fan of a block."""

    make = init.KaimingUniform


class KaimingNormalInitializer(_Kaiming):
    """Normal, by one fan of a block; RecIS 1.0 gives a uniform distribution instead."""

    make = init.KaimingNormal


_ONLY_WHEN_ASKED = 1 << 30  # steps between two checks: HashTableFilterHook makes them


class _Policy:
    policy: str  # the only name that is supported
    others: str  # Karvan's other rules
    expects: tuple[set[str], str]  # the names of its parameters, also as a text

    def __init__(self, name: str, params: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.params = dict(params or {})
        if name != self.policy:
            raise UnsupportedError(
                f'{type(self).__name__}("{name}")',
                f'expected "{self.policy}"; see {self.others} for other rules.',
            )
        names, text = self.expects
        if set(self.params) != names:
            raise ValueError(f"{name} expects {text}, got {self.params}.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.params})"


class AdmitHook(_Policy):
    """Which unknown ids get rows: "ReadOnly", none."""

    policy, others, expects = "ReadOnly", "kv.admission", (set(), "no parameters")


class FilterHook(_Policy):
    """Which rows are removed: "GlobalStepFilter", those unused for `filter_step` steps.

    `HashTableFilterHook` says when.
    """

    policy, others = "GlobalStepFilter", "kv.eviction"
    expects = ({"filter_step"}, '{"filter_step": steps}')


def admission(hook: AdmitHook | None) -> Admission:
    """Karvan's rule for a hook."""
    return Always() if hook is None else ReadOnly()


def eviction(hook: FilterHook | None) -> Eviction:
    """Karvan's rule for a hook."""
    if hook is None:
        return Never()
    return recis.global_step_filter(int(hook.params["filter_step"]), every=_ONLY_WHEN_ASKED)


_REDUCES = {"worker": "mean", "worker_sum": "sum", "id": "key"}


def connect_ranks(grad_reduce_by: str | None = None, device: torch.device | str = "cpu") -> None:
    """Connect the ranks of a program, unless that has been done; called before tables are made.

    grad_reduce_by: "worker" divides a row's gradients by the number of ranks, "id" by the number of those
    that had the id, "worker_sum" not at all. All tables of a program have the same. None: as they have it.
    device: where the rows of ranks are, of all tables; of a single process each table has its own.
    """
    if grad_reduce_by is not None and grad_reduce_by not in _REDUCES:
        raise UnsupportedError(
            f'grad_reduce_by="{grad_reduce_by}"', f"expected one of {', '.join(_REDUCES)}."
        )
    reduce = _REDUCES[grad_reduce_by or "worker"]
    connection = distributed.current()
    if not connection.chosen or connection.settings.kind == "memory":  # which `disconnect` leaves, too
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            distributed.connect("sharded", grad_reduce=reduce, device=device_of(device).type)
    elif grad_reduce_by and connection.world_size > 1 and connection.settings.grad_reduce != reduce:
        raise UnsupportedError(
            f'grad_reduce_by="{grad_reduce_by}" beside tables with another one',
            "expected the same for all tables of a program.",
        )


def table_device(device: torch.device | str) -> str | None:
    """Where the rows of a table are, in the words of `kv.Table`."""
    kind, settings = device_of(device).type, distributed.current().settings
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f'device="{kind}" of a table', 'expected "cpu" or "cuda".')
    if settings.kind != "sharded":
        return "cuda" if kind == "cuda" else None
    if kind != settings.device:
        raise UnsupportedError(
            f'device="{kind}" of a table beside tables with device="{settings.device}"',
            "expected the same for all tables of a program with several ranks.",
        )
    return None


def shared_seed() -> int:
    """The seed of `torch.manual_seed`, that of rank 0 on all ranks: new rows are a function of it."""
    seed = torch.initial_seed()
    return int(distributed.current().main.gather_json(seed)[0])


filtered: WeakSet[TableHandle] = WeakSet()
"""The tables with a FilterHook, which HashTableFilterHook filters."""


class SparseParameter:
    """The rows of one table, as `filter_out_sparse_param` gives them to optimizers."""

    def __init__(self, engine: Engine, handle: TableHandle) -> None:
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

    def reset(self) -> None:
        """Remove all rows."""
        self.handle.clear()

    def clear(self, child: str | None = None) -> None:
        """Remove all rows."""
        self._check(child)
        self.reset()

    def _check(self, child: str | None) -> None:
        if child not in (None, self.handle.name):
            raise ValueError(f"Table '{self.handle.name}' has no child '{child}': tables are never merged.")

    def __repr__(self) -> str:
        return f"HashTable_{self.handle.name}"


class HashTable(SparseParameter, nn.Module):
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


def make_engine(features: dict[str, Table]) -> Engine:
    """An engine of Karvan; its tables with filters are noted."""
    engine = Engine(features, seed=shared_seed())
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
    engines = [module for module in model.modules() if isinstance(module, Engine)]
    return {handle.name: SparseParameter(engine, handle) for engine in engines for handle in engine.tables()}


def handles_of(param_dict: Mapping[str, SparseParameter]) -> list[TableHandle]:
    """The tables that an optimizer is given."""
    if not isinstance(param_dict, Mapping):
        raise TypeError(
            "A sparse optimizer expects what filter_out_sparse_param(model) gives, got "
            f"{type(param_dict).__name__}."
        )
    return [table.handle for table in param_dict.values()]


def engines_of(tables: Mapping[str, SparseParameter]) -> list[Engine]:
    """The engines of some tables, each once; an error unless all tables of them are given."""
    engines = list({id(table.engine): table.engine for table in tables.values()}.values())
    names = {table.handle.name for table in tables.values()}
    for handle in (handle for engine in engines for handle in engine.tables()):
        if handle.name not in names:
            raise UnsupportedError(
                f"a checkpoint without table '{handle.name}'", "give all tables of a model."
            )
    return engines


_COMBINERS = ("sum", "mean", "tile")
_LATER = ("hdmp_group_size", "hdmp_group_reduce_by", "fp16_enabled", "pg", "max_partition_num")


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
        require_defaults(EmbeddingOption, self, dict.fromkeys(_LATER, "leave it out."))
        require_unmerged(self.shared_name, self.coalesced, self.children)
        if self.no_reduce:
            return
        if self.combiner not in _COMBINERS:
            raise UnsupportedError(f"combiner {self.combiner!r}", f"expected one of {', '.join(_COMBINERS)}.")
        if self.combiner == "tile" and "tile_len" not in (self.combiner_kwargs or {}):
            raise ValueError('combiner "tile" expects combiner_kwargs={"tile_len": n}.')
        options = {"tile_len"} if self.combiner == "tile" else set()
        if unknown := set(self.combiner_kwargs or {}) - options:
            raise UnsupportedError(f"combiner_kwargs {sorted(unknown)}", "leave them out.")

    def table(self) -> Table:
        """Karvan's declaration."""
        initializer = self.initializer or ConstantInitializer()
        tiled = self.combiner == "tile" and not self.no_reduce
        return recis.table(
            self.embedding_dim,
            self.shared_name,
            combiner="index" if self.no_reduce else str(self.combiner),
            length=int((self.combiner_kwargs or {})["tile_len"]) if tiled else None,
            use_weights=bool(self.use_weight) and not tiled,
            dtype=self.dtype,
            init=initializer.native(self.embedding_dim, self.block_size),
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


class EmbeddingEngine(nn.Module):
    """Embeds features; entries of other names are passed through, lists as dense tensors.

    Lists are filled up with zeros to the longest of the batch; those of bytes stay as they are.
    use_pinned_memory changes nothing: copies to a GPU are made from page-locked memory anyway.
    """

    def __init__(self, emb_options: Mapping[str, EmbeddingOption], use_pinned_memory: bool = False) -> None:
        super().__init__()
        for option in emb_options.values():
            connect_ranks(option.grad_reduce_by or "worker", option.device)
        self._options = dict(emb_options)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the dense rows of the newest batch with samples
        self.engine = make_engine({name: option.table() for name, option in emb_options.items()})

    def forward(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """The samples with vectors in place of ids; a feature that they lack is not in the result."""
        ids = {name: to_karvan(samples[name]) for name in self._options if name in samples}
        if not ids:
            expected = ", ".join(self._options)
            raise KeyError(f"EmbeddingEngine expects samples with some of {expected}, got {list(samples)}.")
        embedded = self.engine(ids)
        others = {name: self._dense(name, sample) for name, sample in samples.items() if name not in ids}
        vectors = {name: as_vectors(name, embedded[name], self._options[name].trainable) for name in ids}
        return {**others, **vectors}

    def _dense(self, name: str, entry: Any) -> Any:
        """An entry without an embedding as RecIS gives it to the model."""
        if not isinstance(entry, RaggedTensor) or entry.dtype is torch.int8:
            return entry
        dense = entry.to_dense()
        if len(dense):
            self._shapes[name] = tuple(dense.shape[1:])
            return dense
        # A batch without samples, of a rank whose data has ended, is as wide as those before.
        return dense.new_zeros((0, *self._shapes.get(name, (1,) * (dense.dim() - 1))))
