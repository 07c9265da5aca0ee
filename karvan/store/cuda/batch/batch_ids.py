"""The ids of a batch on a device, and how features become descriptors for the kernels.

Features whose tables have the same row layout are looked up together. Every id is a position; those of a
feature start at a multiple of `BLOCK`. Features that are plain, with one vector without a weight for each
output row, come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.rows.arena import RowSpace
from karvan.store.cuda.rows.tables import DeviceTable

_BLOCK = fields.BLOCK.value
_FIELDS = fields.FEATURE_FIELDS.value
_NOWHERE = 1 << 62
_MODES = {"pooled": 0, "cells": 1, "padded": 2}
_COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2}


class FeatureIds(NamedTuple):
    """A feature's ids in a batch, on the store's device."""

    slot: int  # of its table among those of the program
    table: DeviceTable
    mode: str
    combiner: str
    stack: int
    values: Tensor  # int64, cells * stack of them
    offsets: Tensor | None
    weights: Tensor | None
    cells: int
    samples: int
    length: int

    @property
    def positions(self) -> int:
        """How many keys it looks up."""
        return self.cells * self.stack

    @property
    def out_rows(self) -> int:
        """Rows of its output."""
        if self.mode == "cells":
            return self.cells
        return self.samples * self.length if self.mode == "padded" else self.samples

    @property
    def plain(self) -> bool:
        """Whether each of its cells is one output row, without a weight."""
        if self.weights is not None or self.stack != 1:
            return False
        return self.mode == "cells" or (self.offsets is None and (self.mode == "pooled" or self.length == 1))


class GroupShape(NamedTuple):
    """The sizes of a group's launches, in blocks; groups of one shape can use one graph."""

    arena: int
    training: bool
    plain_features: int
    features: int
    positions: int
    plain: int  # blocks of positions of plain features
    samples: int  # blocks of samples of the other features
    outs: int  # blocks of output rows of the other features
    normals: bool


class GroupIds:
    """The features of a batch whose rows are in one arena."""

    def __init__(self, arena: RowSpace, features: Sequence[tuple[int, FeatureIds]], training: bool) -> None:
        self.arena = arena
        ordered = [feature for feature in features if feature[1].plain]
        self.plain_features = len(ordered)
        ordered += [feature for feature in features if not feature[1].plain]
        self.features = ordered
        self.bases: list[int] = []
        blocks = plain = samples = outs = 0
        for number, (_, feature) in enumerate(ordered):
            self.bases.append(blocks * _BLOCK)
            blocks += -(-feature.positions // _BLOCK)
            if number < self.plain_features:
                plain = blocks
            else:
                samples += -(-feature.samples // _BLOCK)
                outs += -(-feature.out_rows // _BLOCK)
        self.plain_end = plain * _BLOCK
        self.versions = {feature.slot: feature.table.version for _, feature in ordered}
        self.shape = GroupShape(
            arena.number,
            training,
            self.plain_features,
            len(ordered),
            launch.coarse(blocks),
            launch.coarse(plain),
            launch.coarse(samples),
            launch.coarse(outs),
            any(feature.table.has_normals for _, feature in ordered),
        )

    @property
    def positions(self) -> int:
        """How many positions there are, with those that only fill blocks."""
        return int(self.shape.positions * _BLOCK)

    def outputs(self, device: torch.device) -> dict[int, Tensor]:
        """Memory for the outputs, by the features' numbers in the program."""
        dim = self.arena.layout.dim
        return {number: torch.empty(f.out_rows, dim, device=device) for number, f in self.features}

    def describe(self, outs: Mapping[int, Tensor]) -> NDArray[np.int64]:
        """The descriptors of all features."""
        rows = []
        out_base = sample_base = 0
        for at, ((number, f), base) in enumerate(zip(self.features, self.bases, strict=True)):
            plain = at < self.plain_features
            rows.append(
                (
                    f.values.data_ptr(),
                    f.cells,
                    base,
                    f.table.number,
                    0 if f.offsets is None else f.offsets.data_ptr(),
                    0 if f.weights is None else f.weights.data_ptr(),
                    f.samples,
                    f.length,
                    f.stack,
                    _MODES[f.mode],
                    _COMBINERS[f.combiner],
                    outs[number].data_ptr(),
                    f.out_rows,
                    _NOWHERE if plain else out_base,
                    0,
                    0,
                    _NOWHERE if plain else sample_base,
                    f.slot,
                )
            )
            if not plain:
                out_base += -(-f.out_rows // _BLOCK) * _BLOCK
                sample_base += -(-f.samples // _BLOCK) * _BLOCK
        return np.array(rows, np.int64).reshape(len(rows), _FIELDS)

    def wanted(self) -> dict[DeviceTable, int]:
        """How many rows of each table the group may insert."""
        wanted: dict[DeviceTable, int] = {}
        for _, feature in self.features:
            wanted[feature.table] = wanted.get(feature.table, 0) + feature.positions
        return wanted

    def spread(self, uses: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """The uses of positions, from those of the features' ids."""
        made = torch.zeros(self.positions, dtype=torch.int32, device=device)
        sizes = np.array([feature.positions for _, feature in self.features], np.int64)
        total = int(sizes.sum())
        if total:
            shifts = torch.from_numpy(np.array(self.bases) - (np.cumsum(sizes) - sizes)).to(device)
            shift = shifts.repeat_interleave(torch.from_numpy(sizes).to(device), output_size=total)
            at = torch.arange(total, device=device) + shift
            made[at] = torch.cat([uses[number] for number, _ in self.features])
        return made
