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
    """Each id becomes `rounds` rows of a table of rounds × size, and their vectors add up.

    Args:
        rounds: How many rows an id has.
        size: How many rows there are for each round.
    """

    rounds: int
    size: int

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.size < 1:
            raise ValueError(f"HashStack expects rounds and size of at least 1, got {self}.")


@dataclass(frozen=True)
class Table:
    """The embedding table of a feature.

    Features whose tables have the same name share rows.

    | combiner | what a sample's ids become |
    |---|---|
    | "sum", "mean", "sqrtn" | one vector: (B, dim). With weights, "mean" divides by their sum |
    | "mean_by_count" | as "mean", divided by the number of ids also if they have weights |
    | "mean_by_density" | "mean_by_count" if a batch has over 5 * (B + 1) ids, else "mean": as RecIS 1.0 |
    | "sequence" | `Padded` vectors (B, L, dim) with a mask |
    | "tile" | the first `length` vectors side by side: (B, length * dim) |
    | "ragged" | every vector, as a `Ragged` |
    | "index" | the vectors of distinct ids, and an index (B, L) into them, as `IndexedRows` |

    Args:
        dim: The number of elements of a vector.
        name: The name of the table; by default that of its feature.
        combiner: How the vectors of a sample's ids are combined.
        length: How many ids "sequence", "tile" and "index" take, from the first. By default "sequence" and
            "index" take those of the longest sample of the batch.
        dtype: The type of stored vectors. Arithmetic and optimizer state are float32; bfloat16 and float16
            are rounded stochastically.
        init: How a new row begins; see `kv.init`.
        admit: Which keys get a row; see `kv.admission`.
        evict: Which rows are removed; see `kv.eviction`.
        hash_stack: Gives each id several rows of a table of limited size.
        device: Where the rows are: "cpu" or "cuda"; by default as `kv.connect` says.
        use_weights: Whether the weights of ids are used.
        read_only: Whether lookups of this feature create no rows, count no uses and have no gradients. Other
            features of the same table still train it.
        missing: What happens if a batch lacks the feature: "error", or "empty", as if no sample had an id.
        padding_idx: An id that stands for none, such as the 0 that fills up a matrix. It has no row.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument is of the wrong kind.

    Example:
        >>> table = kv.Table(
        ...     dim=16,
        ...     name="item",
        ...     combiner="mean",
        ...     admit=kv.admission.MinCount(3),
        ...     evict=kv.eviction.LFU(capacity=1_000_000),
        ... )
        >>> engine = kv.EmbeddingEngine({"history": table})
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
            names = ", ".join(COMBINERS)
            raise ValueError(f"Table expects a combiner out of {names}, got {self.combiner!r}.")
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
        """Describe the table for a store.

        Args:
            name: The name of the table.
            seed: The seed of new rows.
            shards: How many parts the table has.

        Returns:
            The description.
        """
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
        """Check that two features can share the rows of a table.

        Args:
            other: The table as declared by the first feature.
            table: The name of the table.
            feature: The name of this feature.

        Raises:
            ValueError: The declarations differ in what concerns rows.
        """
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
