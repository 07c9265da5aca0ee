"""`Table`: the declaration of one feature's embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from karvan.embedding.admission import Admission, Always
from karvan.embedding.eviction import Eviction, Never
from karvan.embedding.init import Initialiser, Uniform
from karvan.store import TableSpec

POOLED = ("sum", "mean", "mean_by_count", "mean_by_density", "sqrtn")
COMBINERS = (*POOLED, "sequence", "tile", "ragged", "index")
_DEVICES = ("cpu", "cuda")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class HashStack:
    """Each id becomes `rounds` rows of a table of rounds × size, whose vectors add up."""

    rounds: int
    size: int

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.size < 1:
            raise ValueError(f"HashStack expects rounds and size of at least 1, got {self}.")


@dataclass(frozen=True)
class Table:
    """A feature's table. Features whose tables have the same name share rows.

    combiner: "sum", "mean" or "sqrtn" pool a sample's ids to (B, dim); "sequence" gives `Padded` (B, L, dim)
    with a mask, "tile" the first `length` vectors side by side (B, length * dim), "ragged" every vector, as
    a `Ragged`, "index" the vectors of distinct ids and an index (B, L) into them, as `IndexedRows`. If ids
    have weights, "mean" divides by their sum, "mean_by_count" by the number of ids, and "mean_by_density" as
    RecIS 1.0: by the number of ids if the batch has more than 5 * (B + 1) of them, by the sum of weights
    otherwise.
    use_weights: False ignores the weights of ids, as the "tile" of RecIS does.
    length: how many ids "sequence", "tile" and "index" take, from the first; "sequence" and "index" without
    it take those of the longest sample of the batch.
    device: "cpu" or "cuda", where the rows are if not where `kv.connect` says; the vectors of an engine with
    tables on a GPU are all there.
    read_only: lookups of this feature create no rows and count no uses, and it has no gradients; other
    features of the same table still train it.
    padding_idx: an id that is none, such as the 0 that fills up the rows of a matrix: it has no row and no
    gradient, and is not counted, as if it was not in the batch. Other features of the table may have it.
    missing: what happens if a batch lacks the feature: "error", or "empty", as if no sample had an id.
    dtype: of the vectors; arithmetic and optimizer state are float32, and bfloat16 and float16 are rounded
    stochastically.
    """

    dim: int
    name: str | None = None
    combiner: str = "sum"
    length: int | None = None
    dtype: torch.dtype = torch.float32
    init: Initialiser = field(default_factory=Uniform)
    admit: Admission = field(default_factory=Always)
    evict: Eviction = field(default_factory=Never)
    hash_stack: HashStack | None = None
    device: str | None = None
    use_weights: bool = True
    read_only: bool = False
    missing: str = "error"
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or not 1 <= self.dim <= 65536:
            raise ValueError(f"Table expects dim from 1 to 65536, got {self.dim!r}.")
        if self.name == "":
            raise ValueError("Table expects a name that is not empty, or none.")
        if self.combiner not in COMBINERS:
            known = ", ".join(COMBINERS)
            raise ValueError(f"Table expects a combiner out of {known}, got {self.combiner!r}.")
        if self.combiner == "tile" and self.length is None:
            raise ValueError("Table with combiner 'tile' needs length, the number of vectors side by side.")
        if self.length is not None:
            if self.combiner not in ("sequence", "tile", "index"):
                raise ValueError(
                    f"Table takes length with 'sequence', 'tile' and 'index', not with '{self.combiner}'."
                )
            if self.length < 1:
                raise ValueError(f"Table expects length of at least 1, got {self.length}.")
        if self.device not in (None, *_DEVICES):
            raise ValueError(f"Table expects device 'cpu', 'cuda' or None, got {self.device!r}.")
        if self.padding_idx is not None and (
            not isinstance(self.padding_idx, int) or not -(2**63) <= self.padding_idx < 2**64
        ):
            raise ValueError(f"Table expects padding_idx to be an id of 64 bits, got {self.padding_idx!r}.")
        if self.missing not in ("error", "empty"):
            raise ValueError(f"Table expects missing 'error' or 'empty', got {self.missing!r}.")
        if self.dtype not in _DTYPES:
            raise ValueError(f"Table expects dtype float32, bfloat16 or float16, got {self.dtype}.")
        for what, kind in (("init", Initialiser), ("admit", Admission), ("evict", Eviction)):
            value = getattr(self, what)
            if not isinstance(value, kind):
                raise TypeError(f"Table expects {what} to be an {kind.__name__}, got {value!r}.")

    def spec(self, name: str, seed: int, shards: int) -> TableSpec:
        """The table in the store's terms."""
        return TableSpec(
            name=name,
            dim=self.dim,
            dtype=_DTYPES[self.dtype],
            init=self.init.native(self.dim),
            admit=self.admit.native(),
            evict=self.evict.native(),
            seed=seed,
            shards=shards,
        )

    def check_shares_rows_with(self, other: Table, table: str, feature: str) -> None:
        """Raise if `feature`, declared as this, cannot share the rows of `table`, declared as `other`."""
        for what in ("dim", "dtype", "init", "admit", "evict", "hash_stack", "device"):
            has, asks = getattr(other, what), getattr(self, what)
            if has != asks:
                raise ValueError(
                    f"Table '{table}' has {what} {has}, but feature '{feature}' asks for {asks}."
                )


def check_features(features: Any) -> None:
    """Raise unless it is a mapping of features to tables."""
    example = 'kv.EmbeddingEngine({"user": kv.Table(dim=16)})'
    if not isinstance(features, Mapping):
        raise TypeError(
            f"EmbeddingEngine expects a mapping of features to tables, such as {example}, "
            f"got {type(features).__name__}."
        )
    for feature, table in features.items():
        if not isinstance(feature, str) or not feature:
            raise TypeError(f"EmbeddingEngine expects names of features, as in {example}, got {feature!r}.")
        if not isinstance(table, Table):
            raise TypeError(
                f"Feature '{feature}' expects a kv.Table, as in {example}, got {type(table).__name__}."
            )
