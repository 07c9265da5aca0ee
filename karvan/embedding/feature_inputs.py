"""One feature of a batch as input of the native core: checked, contiguous, output allocated.

The output alone, where the ids are elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from karvan import ids, output_buffers
from karvan._native import FeatureArrays
from karvan.embedding.table import POOLED, Table
from karvan.ragged import IdsReference, NestedRagged, Padded, Ragged
from karvan.store.program import LookupInputs, RemoteLookup
from karvan.store.remote.output_layout import OutputLayout


def mode_of(table: Table) -> str:
    """How the native core lays the feature out: "pooled", "padded" or "cells"."""
    return {"sequence": "padded", "tile": "padded", "ragged": "cells"}.get(table.combiner, "pooled")


class Output:
    """A feature's vectors, and how they are laid out."""

    __slots__ = ("_out", "cells", "length", "offsets", "rows", "table")

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows = self.cells = 0
        self.length = 1
        self.offsets: Tensor | None = None
        self._out: Tensor | None = None

    def fill(self, out: Tensor, laid: OutputLayout) -> None:
        """What came from where the ids are."""
        self.rows, self.cells, self.length, self.offsets = laid
        self._out = out

    def layout(self) -> OutputLayout:
        """What `fill` wants to know."""
        return OutputLayout(self.rows, self.cells, self.length, self.offsets)

    def numel(self) -> int:
        """Floats of the output."""
        assert self._out is not None
        return self._out.numel()

    def take_out(self) -> Tensor:
        """Hand the output over: the graph holds this object and the output the graph, so keeping it leaks."""
        assert self._out is not None
        out, self._out = self._out, None
        return out

    def present(self, out: Tensor) -> Tensor | Padded | Ragged:
        """The output in the shape the combiner promises."""
        if self.table.combiner == "tile":
            return out.view(self.rows, self.length * self.table.dim)
        if self.table.combiner == "ragged":
            return Ragged(out, self.offsets)
        if self.table.combiner == "sequence":
            return Padded(out.view(self.rows, self.length, self.table.dim), self.layout().mask())
        return out


class FeatureInput(Output):
    """A feature's ids, and the place of its vectors. Keeps alive what the native core points to."""

    __slots__ = ("values", "weights")

    def __init__(self, name: str, table_name: str, table: Table, entry: object) -> None:
        super().__init__(table)
        offsets: Tensor | None = None
        weights: Tensor | None = None
        if isinstance(entry, Tensor):
            values = entry
        elif isinstance(entry, Ragged):
            values, offsets, weights = entry.values, entry.offsets, entry.weights
        else:
            raise _refusal(name, table_name, TypeError, "a Ragged or a Tensor", type(entry).__name__, entry)
        if values.dtype is not torch.int64:
            if values.dtype is not torch.uint64:
                raise _refusal(name, table_name, TypeError, "ids of torch.int64", str(values.dtype), values)
            values = values.view(torch.int64)
        if not values.is_cpu:
            received = f"ids on {values.device}"
            raise _refusal(name, table_name, ValueError, "ids on the CPU, where its store is", received)
        if values.dim() != 1:
            if values.dim() != 2 or isinstance(entry, Ragged):
                shape = tuple(values.shape)
                raise _refusal(name, table_name, ValueError, "ids of 1 or 2 dimensions", f"shape {shape}")
            offsets = _regular_offsets(*values.shape)
            values = values.reshape(-1)
        if not values.is_contiguous():
            values = values.contiguous()
        count = values.shape[0]
        self.rows = count
        if offsets is not None:
            if offsets.dtype is not torch.int64:
                raise _refusal(name, table_name, TypeError, "offsets of torch.int64", str(offsets.dtype))
            if not offsets.is_contiguous():
                offsets = offsets.contiguous()
            self.rows = offsets.shape[0] - 1
        if weights is not None:
            if weights.shape != values.shape:
                expected = f"{count} weights, one for each id"
                raise _refusal(name, table_name, ValueError, expected, f"{tuple(weights.shape)}")
            weights = weights.detach().to(torch.float32).contiguous()
        self.cells, self.offsets, self.weights = count, offsets, weights
        self.length = self._longest() if table.length is None else table.length
        self.values = values
        if table.hash_stack is not None:
            self.values = ids.hash_stack(values, table.hash_stack.rounds, table.hash_stack.size).reshape(-1)
        self._out = output_buffers.empty(self._cells_out(), table.dim)

    def _longest(self) -> int:
        if self.table.combiner != "sequence" or self.offsets is None:
            return 1
        # Bounded by the number of ids: offsets the native core will refuse must not ask for absurd memory.
        longest = int(self.offsets.diff().max()) if self.rows else 0
        return min(max(longest, 0), self.cells)

    def _cells_out(self) -> int:
        if self.table.combiner in POOLED:
            return self.rows
        return self.cells if self.table.combiner == "ragged" else self.rows * self.length

    def arrays(self) -> FeatureArrays:
        """What the native call reads and writes, by address."""
        assert self._out is not None
        return FeatureArrays(
            values=self.values.data_ptr(),
            cells=self.cells,
            samples=self.rows,
            out=self._out.data_ptr(),
            offsets=0 if self.offsets is None else self.offsets.data_ptr(),
            weights=0 if self.weights is None else self.weights.data_ptr(),
            length=self.length,
        )


class Inputs:
    """All features of a batch: their ids are here, or where a reference says."""

    def __init__(self, each: Sequence[Output], reference: IdsReference | None = None) -> None:
        self.each = each
        self._reference = reference

    def asked(self) -> LookupInputs:
        """What a store is asked with."""
        if self._reference is not None:
            return self._reference
        return [one.arrays() for one in self.each if isinstance(one, FeatureInput)]

    def fill(self, lookup: RemoteLookup) -> None:
        """Take what came from where the ids are."""
        for one, (out, laid) in zip(self.each, lookup.take(), strict=True):
            one.fill(out, laid)

    def take_out(self) -> tuple[Tensor, ...]:
        """Hand all outputs over."""
        return tuple(one.take_out() for one in self.each)


def _refusal(
    feature: str,
    table: str,
    kind: type[TypeError] | type[ValueError],
    expected: str,
    received: str,
    entry: object = None,
) -> TypeError | ValueError:
    told = f"Feature '{feature}' of table '{table}': expected {expected}, got {received}."
    return kind(told + _advice(feature, entry))


def _advice(feature: str, entry: object) -> str:
    """What to do with ids that are something else."""
    values = entry.values if isinstance(entry, NestedRagged | Ragged) else entry
    dtype = values.dtype if isinstance(values, Tensor) else None
    if dtype is torch.uint8 or _is_text(values):
        return (
            f" This looks like text: make ids of it by kv.Feature('{feature}').hash(\"farm\") in a "
            f"FeatureEngine, or read it with columns=[kv.data.Varlen('{feature}', hash=\"farm\"), …]. "
            f"Text of ids, such as '12 7 30', becomes ids by kv.Feature('{feature}').split(\" \").to_ids()."
        )
    if dtype is not None and dtype.is_floating_point:
        return (
            f" Numbers become ids by kv.Feature('{feature}').bucketize([…]). If they are ids that became "
            "floats because some are missing, as pandas does it, keep them as Int64 in pandas, or read them "
            f"with columns=[kv.data.Fixed('{feature}', dtype=torch.int64), …]."
        )
    if dtype is not None:
        return f" Convert them: batch['{feature}'].long()."
    return (
        " kv.data.read makes batches of tensors from arrays and frames." if hasattr(values, "dtype") else ""
    )


def _is_text(values: object) -> bool:
    if getattr(getattr(values, "dtype", None), "kind", "") in ("U", "S"):  # numpy's
        return True
    try:
        return isinstance(next(iter(values), None), str | bytes)  # type: ignore[call-overload]
    except TypeError:
        return False


@functools.lru_cache(maxsize=64)
def _regular_offsets(rows: int, length: int) -> Tensor:
    return torch.arange(0, rows * length + 1, length) if length else torch.zeros(rows + 1, dtype=torch.int64)
