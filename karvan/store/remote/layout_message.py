"""The layouts of a batch's outputs as a message, from the embedding worker that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from karvan.store.program import LookupProgram
from karvan.store.remote.output_layout import OutputLayout, RowIndex
from karvan.wire import Array, RefusedError
from karvan.wire.schema import expect_array


class LayoutArrays(NamedTuple):
    """The arrays of the layouts of all features, each concatenated."""

    offsets: Array
    rows: Array
    weights: Array


def pack_layouts(layouts: Sequence[OutputLayout]) -> tuple[list[list[Any]], LayoutArrays]:
    """The sizes of layouts, and their arrays."""
    sizes = []
    offsets: list[Array] = [np.empty(0, np.int64)]
    rows: list[Array] = [np.empty(0, np.int32)]
    weights: list[Array] = [np.empty(0, np.float32)]
    for layout in layouts:
        own = layout.row_index
        described = None if own is None else [own.vectors, *own.rows.shape, own.weights is not None]
        sizes.append([layout.samples, layout.ids, layout.length, layout.offsets is not None, described])
        if layout.offsets is not None:
            offsets.append(layout.offsets.numpy())
        if own is not None:
            rows.append(own.rows.reshape(-1).to(torch.int32).numpy())
        if own is not None and own.weights is not None:
            weights.append(own.weights.reshape(-1).numpy())
    return sizes, LayoutArrays(np.concatenate(offsets), np.concatenate(rows), np.concatenate(weights))


def unpack_layouts(
    program: LookupProgram, sizes: Sequence[Sequence[Any]], arrays: LayoutArrays
) -> list[OutputLayout]:
    """The layouts of a program's features; a RefusedError unless arrays are as large as their sizes say.

    Offsets are within the ids, and an index within the vectors.
    """
    if len(sizes) != len(program.features):
        raise RefusedError(f"expected {len(program.features)} features, got {len(sizes)}.")
    offsets, rows, weights = map(_Parts, arrays)
    made = []
    for feature, (samples, ids, length, has_offsets, described) in zip(program.features, sizes, strict=True):
        title = f"'{feature.name}'"
        begins = own = None
        if has_offsets:
            found = offsets.next(samples + 1)
            ends = len(found) == samples + 1 and found[0] == 0 and found[-1] == ids
            if not ends or (np.diff(found) < 0).any():
                raise RefusedError(f"expected offsets of {samples} samples and {ids} ids for {title}.")
            begins = torch.from_numpy(found.copy())
        if (described is not None) != (program.features_json[feature.name][2] == "index"):
            raise RefusedError(f"expected an index for features with that combiner only, got {title}.")
        if described is not None:
            vectors, *shape, has_weights = described
            cells = shape[0] * shape[1]
            found = rows.next(cells)
            if len(found) != cells or not 0 < vectors <= samples or not _within(found, vectors):
                expected = f"expected an index of {shape[0]} samples into {vectors} of {samples} vectors"
                raise RefusedError(f"{expected} for {title}.")
            own = RowIndex(vectors, torch.from_numpy(found.astype(np.int64)).view(*shape), None)
            if has_weights:
                found = weights.next(cells)
                if len(found) != cells:
                    raise RefusedError(f"expected {cells} weights for {title}, got {len(found)}.")
                own = own._replace(weights=torch.from_numpy(found.copy()).view(*shape))
        made.append(OutputLayout(samples, ids, length, begins, own))
    for name, parts in (("offsets", offsets), ("rows", rows), ("weights", weights)):
        expect_array(parts.array, name, parts.array.dtype.name, parts.at)
    return made


class _Parts:
    """An array that is read part by part."""

    def __init__(self, array: Array) -> None:
        self.array, self.at = array, 0

    def next(self, size: int) -> Array:
        """The next part, shorter where the array ends."""
        self.at += size
        return self.array[self.at - size : self.at]


def _within(rows: Array, vectors: int) -> bool:
    return not len(rows) or bool(rows.min() >= 0 and rows.max() < vectors)
