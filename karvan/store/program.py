"""Lookups of whole batches: the features of an engine, and what a store remembers of a batch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from karvan.native import _native, is_built
from karvan.ragged import IdsReference
from karvan.store.types import FeatureSpec

_HAS_POOL = is_built()


def empty(*shape: int) -> Tensor:
    """Uninitialised floats from the native pool; fresh memory would cost page faults in every step.

    Without the native core they are in fresh memory.
    """
    count = math.prod(shape)
    if count == 0 or not _HAS_POOL:
        return torch.empty(shape)
    # Not a view of a flat tensor: users may change outputs in place, like those of any other module.
    return torch.frombuffer(_native.Buffer(4 * count), dtype=torch.float32, count=count).resize_(shape)


# The layout of outputs that an embedding worker computes.


class RowIndex(NamedTuple):
    """Which rows of an output the samples of a batch have, for the combiner "index".

    vectors: the rows of the output that the index refers to; what follows them is not used. Row 0 is zeros.
    rows: (samples, length), int64, 0 where a sample has no id. weights: likewise, float32, of ids.
    """

    vectors: int
    rows: Tensor
    weights: Tensor | None


class OutputLayout(NamedTuple):
    """The layout of a feature's output.

    ids: of all samples; length: cells of a sample; offsets: where the ids of samples start, None where each
    sample has one id. row_index: of the combiner "index", whose output has lists of ids for samples.
    """

    samples: int
    ids: int
    length: int
    offsets: Tensor | None
    row_index: RowIndex | None = None

    def rows(self, mode: str) -> int:
        """The rows of the output of a feature with this mode."""
        if mode == "pooled":
            return self.samples
        return self.ids if mode == "cells" else self.samples * self.length

    def lengths(self) -> Tensor:
        """The number of ids of each sample."""
        if self.offsets is None:
            return torch.ones(self.samples, dtype=torch.int64)
        return self.offsets.diff()

    def mask(self) -> Tensor:
        """(samples, length), True where a padded output has the vector of an id."""
        lengths = self.lengths().unsqueeze(1)
        return torch.arange(self.length, device=lengths.device) < lengths


class FeatureTensors(NamedTuple):
    """A feature's ids in one batch, for stores that take tensors.

    keys: int64, `FeatureSpec.stack` for each id. weights: float32, of ids. layout: of the output. Its offsets
    are those of the batch, int64, which nobody has checked yet. Of a padded sample, ids beyond the layout's
    length are not looked up.
    """

    keys: Tensor
    weights: Tensor | None
    layout: OutputLayout

    def arrays(self, out: Tensor) -> _native.FeatureArrays:
        """What the native core reads and writes, by address."""
        samples, cells, length, offsets, _ = self.layout
        return _native.FeatureArrays(
            values=self.keys.data_ptr(),
            cells=cells,
            samples=samples,
            out=out.data_ptr(),
            offsets=0 if offsets is None else offsets.data_ptr(),
            weights=0 if self.weights is None else self.weights.data_ptr(),
            length=length,
        )


# A batch: arrays for the native core, tensors for a store that takes them, or a reference to remote ids.
LookupInputs: TypeAlias = "list[_native.FeatureArrays] | tuple[FeatureTensors, ...] | IdsReference"


class LookupProgram:
    """The features of an engine in the form a store needs, made once.

    A table's slot is its index in `tables`, which are in the order in which features first name them.
    features_json: the features as JSON, for embedding workers, which embed in place of the engine.
    """

    def __init__(
        self, features: Sequence[FeatureSpec], features_json: Mapping[str, Any] | None = None
    ) -> None:
        self.features = list(features)
        self.features_json = dict(features_json or {})
        self.name = hashlib.sha256(json.dumps(self.features_json).encode()).hexdigest()[:16]
        dims: dict[str, int] = {}
        for feature in self.features:
            if feature.dim != dims.setdefault(feature.table, feature.dim):
                raise ValueError(
                    f"{feature.title} expected dim {dims[feature.table]} like the features of that table "
                    f"before it, got {feature.dim}."
                )
        self.tables = list(dims)

    @cached_property
    def native(self) -> _native.Program:
        """The program of the native core, made when a store first asks for it."""
        return _native.Program([feature.native() for feature in self.features])


@lru_cache(256)
def program_of_ranks(tables: tuple[str, ...], dims: tuple[int, ...], ranks: int) -> LookupProgram:
    """The program of what ranks ask an owner of rows for: single keys of each rank and table."""
    return LookupProgram(
        [
            FeatureSpec(f"{table} for rank {rank}", table, dim=dim, mode="cells")
            for rank in range(ranks)
            for table, dim in zip(tables, dims, strict=True)
        ]
    )


class LookupState(Protocol):
    """What a store remembers of a batch, from `prepare` until its gradients are sent or held."""

    @property
    def plan(self) -> _native.Plan | None:
        """The batch, grouped by key by the native core; None where the core is not used."""


@runtime_checkable
class RemoteLookup(LookupState, Protocol):
    """A batch whose outputs the store makes: its ids are remote, or the store takes them as tensors."""

    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        """Hand over the outputs of all features; the lookup does not hold them afterwards."""


@dataclass(eq=False)
class MadeOutputs(RemoteLookup):
    """A lookup that has made its outputs, which are by the features' numbers in the program."""

    plan: ClassVar[None] = None
    _outs: dict[int, Tensor]
    _layouts: Sequence[OutputLayout]

    @override
    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        outs, self._outs = self._outs, {}
        return [(outs[number], layout) for number, layout in enumerate(self._layouts)]


Prepared: TypeAlias = "_native.Plan | LookupState"  # what a store's `prepare` gives to its own `forward`


class LookupPlan(NamedTuple):
    """A batch between lookup and gradients: the native plan, and the tables' versions at the lookup.

    remote: what a store with remote rows must remember. Where the ids are remote as well, or the store takes
    tensors, there is no native plan; `remote` is a `RemoteLookup` then.
    """

    native: _native.Plan | None
    versions: Mapping[str, int]
    remote: LookupState | None = None


G = TypeVar("G")
Passes: TypeAlias = Sequence[tuple[LookupPlan, G]]  # backward passes: the lookup and its gradients
