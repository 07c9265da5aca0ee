"""One feature of a batch as input of a store: checked and contiguous, with memory for its output.

Where the ids are remote, only the output. A store that takes tensors makes the output itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from karvan import ids
from karvan.embedding.table import POOLED, HashStack, Table
from karvan.native import _native
from karvan.ragged import (
    IdsReference,
    IndexedRows,
    NestedRagged,
    OptionalText,
    Padded,
    Ragged,
    is_text,
    rows_of,
)
from karvan.store import LookupProgram
from karvan.store.base import Store
from karvan.store.program import FeatureTensors, LookupInputs, OutputLayout, RemoteLookup, RowIndex, empty
from karvan.store.types import FeatureSpec

# The ids of a feature for the combiner "index": a lookup of distinct ids, and which of them samples have.
#
# The store is asked for lists of ids, which it pools: one without ids, whose vector of zeros is for padding,
# one for each distinct id, and lists of all further occurrences. The vectors of those last lists are not
# used, but by them ids are counted as with every other combiner, for policies that depend on it.


_LONGEST = 256  # ids of a list of further occurrences, so that lists are pooled in parallel


class DistinctIds(NamedTuple):
    """What is looked up: lists of ids, whose sums `row_index` refers to."""

    values: Tensor
    offsets: Tensor
    row_index: RowIndex


def find_distinct(values: Tensor, offsets: Tensor | None, weights: Tensor | None, length: int) -> DistinctIds:
    """The distinct ids among the first `length` of each sample, in ascending order.

    offsets: where the ids of samples start, without errors; None: each sample has one id.
    """
    device = values.device
    if offsets is None:
        offsets = torch.arange(values.shape[0] + 1, device=device)
    lengths, samples = offsets.diff(), offsets.shape[0] - 1
    # The cell of each id, among (samples, length) cells.
    shifts = torch.arange(samples, device=device) * length - offsets[:-1]
    cells = torch.arange(values.shape[0], device=device) + shifts.repeat_interleave(lengths)
    if samples and int(lengths.max()) > length:
        ends = (torch.arange(samples, device=device) + 1) * length
        valid = cells < ends.repeat_interleave(lengths)
        cells, values = cells[valid], values[valid]
        weights = None if weights is None else weights[valid]
    distinct, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    if weights is not None:
        weights = _spread(weights, cells, samples, length)
    row_index = RowIndex(distinct.shape[0] + 1, _spread(inverse + 1, cells, samples, length), weights)
    again = distinct.repeat_interleave(counts - 1)
    starts = [
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.arange(distinct.shape[0], device=device),
        torch.arange(distinct.shape[0], values.shape[0], _LONGEST, device=device),
        torch.full((1,), values.shape[0], device=device),
    ]
    return DistinctIds(torch.cat([distinct, again]), torch.cat(starts), row_index)


def _spread(values: Tensor, cells: Tensor, samples: int, length: int) -> Tensor:
    """(samples, length), with values in these cells and zeros in others."""
    padded = torch.zeros(samples * length, dtype=values.dtype, device=values.device)
    return padded.scatter_(0, cells, values).view(samples, length)


_CPU = torch.device("cpu")
_NARROW = (torch.int32, torch.int16, torch.uint32, torch.uint16, torch.bool)
_FEWEST_ROWS = 16  # of a matrix in which a padding can be told
_EIGHT_BITS = (torch.int8, torch.uint8)
Refuse: TypeAlias = Callable[..., TypeError | ValueError]  # the error of what it expected and received
_TEXTS_SEEN = 100  # for an error


# How the native core arranges the output of a feature with these combiners; it pools others.
_MODES = {"sequence": "padded", "tile": "padded", "ragged": "cells"}


class Output:
    """A feature's vectors and their layout.

    lists: where each sample has several lists, which the core takes for samples: their shape, or offsets.
    """

    __slots__ = ("layout", "lists", "out", "table")

    def __init__(self, table: Table) -> None:
        self.table = table
        self.layout = OutputLayout(0, 0, 1, None)
        self.lists: tuple[int, int] | Tensor | None = None
        self.out: Tensor | None = None

    def present(self, out: Tensor) -> Tensor | Padded | Ragged | IndexedRows:
        """The output in the shape that the combiner defines."""
        table, layout = self.table, self.layout
        if table.combiner == "tile":
            return out.view(layout.samples, layout.length * table.dim)
        if table.combiner == "ragged":
            return Ragged(out, layout.offsets)
        if table.combiner == "sequence":
            return Padded(out.view(layout.samples, layout.length, table.dim), layout.mask())
        if layout.row_index is not None:
            count, rows, weights = layout.row_index
            weights = None if weights is None else _on(out.device, weights)
            return IndexedRows(
                out if count == layout.samples else out[:count], _on(out.device, rows), weights
            )
        if self.lists is None:
            return out
        if isinstance(self.lists, tuple):
            return out.view(*self.lists, table.dim)
        return Ragged(out, self.lists.to(out.device, non_blocking=True))


class FeatureInput(Output):
    """A feature's ids, and the vectors. Holds all that the native core points to.

    rows: the number of samples of the batch. The core takes for samples what has a vector: with lists of
    lists each list, with the combiner "index" each distinct id.
    """

    __slots__ = ("rows", "tensors")

    def __init__(
        self, name: str, table_name: str, table: Table, entry: object, device: torch.device = _CPU
    ) -> None:
        self.table = table
        self.lists = self.out = None
        if (
            type(entry) is Tensor
            and entry.dtype is torch.int64
            and entry.device == device
            and entry.dim() == 1
            and entry.is_contiguous()
            and table.hash_stack is None
            and table.padding_idx is None
            and table.combiner != "index"
        ):  # one id for each sample, as most features have: there is nothing to check or convert
            self.rows = count = entry.numel()
            self.layout = OutputLayout(count, count, 1 if table.length is None else table.length, None)
            self.tensors = FeatureTensors(entry, None, self.layout)
            return
        offsets: Tensor | None = None
        weights: Tensor | None = None
        refuse = partial(_refusal, name, table_name)
        if isinstance(entry, NestedRagged) or (isinstance(entry, Tensor) and entry.dim() == 3):
            entry = self._take_lists(refuse, entry)
        if isinstance(entry, Tensor):
            values = entry
        elif isinstance(entry, Ragged):
            values, offsets = entry.values, entry.offsets
            weights = entry.weights if table.use_weights else None
        else:
            raise refuse(TypeError, "a Ragged or a Tensor", type(entry).__name__, entry)
        if values.dtype is not torch.int64:
            values = _widened(values, isinstance(entry, Tensor))
            if values.dtype is not torch.int64:
                raise refuse(TypeError, "ids of torch.int64", str(values.dtype), entry)
        if values.device != device and not values.is_cpu:
            where = ", where its store is" if device == _CPU else f" or {device}"
            raise refuse(ValueError, f"ids on the CPU{where}", f"ids on {values.device}")
        if values.dim() != 1:
            if values.dim() != 2 or isinstance(entry, Ragged):
                raise refuse(ValueError, "ids of 1 to 3 dimensions", f"shape {tuple(values.shape)}")
            offsets = _regular_offsets(*values.shape, values.device)
            values = values.reshape(-1)
        if not values.is_contiguous():
            values = values.contiguous()
        width = entry.shape[1] if isinstance(entry, Tensor) and entry.dim() == 2 else None
        if table.padding_idx is not None:
            values, offsets, weights = self._without_padding(refuse, values, offsets, weights)
        samples = count = values.shape[0]
        if offsets is not None:
            if offsets.dtype is not torch.int64:
                raise refuse(TypeError, "offsets of torch.int64", str(offsets.dtype))
            if not offsets.is_contiguous():
                offsets = offsets.contiguous()
            samples = offsets.shape[0] - 1
        if weights is not None:
            if weights.shape != values.shape:
                raise refuse(ValueError, f"{count} weights, one for each id", f"{tuple(weights.shape)}")
            weights = weights.detach().to(torch.float32).contiguous()
        self.rows = samples
        if self.lists is not None:
            self.rows = self.lists[0] if isinstance(self.lists, tuple) else self.lists.shape[0] - 1
        length = self._longest(width, offsets, count) if table.length is None else table.length
        if table.combiner != "index":
            self.layout = OutputLayout(samples, count, length, offsets)
        else:  # the distinct ids, and those that occur again, in lists that take the place of samples
            if offsets is not None:
                _check_tiles(refuse, offsets, count)
            values, offsets, row_index = find_distinct(values, offsets, weights, length)
            weights = None
            self.layout = OutputLayout(offsets.shape[0] - 1, values.shape[0], 1, offsets, row_index)
        if table.hash_stack is not None:
            values = ids.hash_stack(values, table.hash_stack.rounds, table.hash_stack.size).reshape(-1)
        self.tensors = FeatureTensors(values, weights, self.layout)

    def _take_lists(self, refuse: Refuse, entry: Tensor | NestedRagged) -> Tensor | Ragged:
        """Lists of lists of ids as lists, each of which becomes a vector."""
        values = entry if isinstance(entry, Tensor) else entry.values
        if _widened(values[:0], isinstance(entry, Tensor)).dtype is not torch.int64:
            raise refuse(TypeError, "ids of torch.int64", str(values.dtype), entry)
        if self.table.combiner not in POOLED:
            expected = f"a list of ids for each sample with the combiner '{self.table.combiner}'"
            raise refuse(ValueError, expected, "lists of lists")
        if isinstance(entry, Tensor):
            self.lists = (entry.shape[0], entry.shape[1])
            return entry.flatten(0, 1)
        lists = entry.inner.shape[0] - 1
        if entry.outer.is_cpu and not _tiles(entry.outer, lists):
            received = f"offsets {entry.outer.tolist()[:10]}"
            raise refuse(ValueError, f"outer offsets from 0 to {lists} lists", received)
        self.lists = entry.outer
        return entry.lists()

    def _without_padding(
        self, refuse: Refuse, values: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The ids that are not `padding_idx`, in rows that are shorter by the others."""
        padding = self.table.padding_idx
        assert padding is not None
        if offsets is None:
            offsets = torch.arange(values.shape[0] + 1, device=values.device)
        _check_tiles(refuse, offsets, values.shape[0])
        keeps = values != (padding if padding < 2**63 else padding - 2**64)
        before = torch.zeros(values.shape[0] + 1, dtype=torch.int64, device=values.device)
        torch.cumsum(keeps, 0, out=before[1:])
        if weights is not None and weights.shape == keeps.shape:  # others are refused below
            weights = weights[keeps]
        return values[keeps], before[offsets], weights

    def _longest(self, width: int | None, offsets: Tensor | None, count: int) -> int:
        if self.table.combiner not in ("sequence", "index") or offsets is None:
            return 1
        if width is not None:  # all rows of a matrix have it, padded or not
            return width
        # On a GPU this waits: the shape of the output depends on it. `Table(length=…)` avoids that.
        # Bounded by the number of ids: wrong offsets, which the native core refuses later, must not allocate
        # absurd amounts of memory.
        longest = int(offsets.diff().max()) if offsets.shape[0] > 1 else 0
        return min(max(longest, 0), count)

    def arrays(self) -> _native.FeatureArrays:
        """What the native call reads and writes, by address; allocates the output."""
        table = self.table
        self.out = empty(self.layout.rows(_MODES.get(table.combiner, "pooled")), table.dim)
        return self.tensors.arrays(self.out)


@dataclass(eq=False, slots=True)
class Inputs:
    """All features of a batch: their ids, or a reference to remote ids."""

    outputs: Sequence[Output]
    reference: IdsReference | None = None

    def for_store(self, store: Store) -> LookupInputs:
        """The inputs of the store's `prepare` and `forward`."""
        if self.reference is not None:
            return self.reference
        features = [output for output in self.outputs if isinstance(output, FeatureInput)]
        if store.takes_tensors:
            return tuple([feature.tensors for feature in features])
        return [feature.arrays() for feature in features]

    def part(self, chosen: Sequence[int]) -> Inputs:
        """The inputs of some of the features."""
        return Inputs([self.outputs[index] for index in chosen])

    def fill(self, lookup: RemoteLookup) -> None:
        """Take the outputs that a lookup has returned."""
        for output, (out, layout) in zip(self.outputs, lookup.take(), strict=True):
            output.out = out
            if (row_index := output.layout.row_index) is not None:  # made here; the store does not see it
                layout = layout._replace(row_index=row_index)
            output.layout = layout

    def take_out(self) -> tuple[Tensor, ...]:
        """Return and release all outputs: the graph holds this object, and the outputs hold the graph."""
        outs = tuple([output.out for output in self.outputs])
        for output in self.outputs:
            output.out = None
        return cast("tuple[Tensor, ...]", outs)


def _widened(values: Tensor, single: bool) -> Tensor:
    """Integers and booleans as int64, if that loses nothing; in lists, 8 bits are text."""
    if values.dtype is torch.uint64:
        return values.view(torch.int64)
    narrow = values.dtype in _NARROW or (single and values.dtype in _EIGHT_BITS)
    return values.to(torch.int64) if narrow else values


def _refusal(
    feature: str,
    table: str,
    kind: type[TypeError] | type[ValueError],
    expected: str,
    received: str,
    entry: object = None,
) -> TypeError | ValueError:
    problem = f"Feature '{feature}' of table '{table}': expected {expected}, got {received}."
    return kind(problem + _advice(feature, entry))


def _advice(feature: str, entry: object) -> str:
    """How to turn a value of another type into ids."""
    values = entry.values if isinstance(entry, NestedRagged | Ragged) else entry
    dtype = values.dtype if isinstance(values, Tensor) else None
    if dtype is torch.uint8 or _is_text(values):
        usual = (
            f"turn it into ids by kv.Feature('{feature}').hash(\"farm\") in a FeatureEngine, or read it with "
            f"columns=[kv.data.Varlen('{feature}', hash=\"farm\"), …]; in a config, by features: "
            f"{{{feature}: [{{hash: farm}}]}}."
        )
        if (lists := _list_in_text(entry)) is None:
            return f" This looks like text: {usual}"
        text, separator, is_number = lists
        step, key = ("to_ids()", "to_ids") if is_number else ('hash("farm")', "{hash: farm}")
        return (
            f" This looks like text. If values such as {text!r} are lists, split them first: "
            f"kv.Feature('{feature}').split(\"{separator}\").{step} in a FeatureEngine; in a config, "
            f'features: {{{feature}: [{{split: "{separator}"}}, {key}]}}. If each is one id, {usual}'
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


def _list_in_text(entry: object) -> tuple[str, str, bool] | None:
    """A text that may be a list, what separates its elements, and whether these are integers."""
    offsets = entry.inner if isinstance(entry, OptionalText) else getattr(entry, "offsets", None)
    if not isinstance(offsets, Tensor) or not is_text(entry):
        return None
    bounds = offsets[:_TEXTS_SEEN].tolist()
    letters = bytes(entry.values[: max(bounds)].tolist())
    texts = [letters[start:end].decode(errors="replace").strip() for start, end in pairwise(bounds)]
    for separator in "|;, ":
        for text in texts:
            if separator in text:
                return text[:100], separator, all(map(str.isdecimal, text.split(separator)))
    return None


def _is_text(values: object) -> bool:
    if getattr(getattr(values, "dtype", None), "kind", "") in ("U", "S"):  # numpy's
        return True
    try:
        return isinstance(next(iter(values), None), str | bytes)  # type: ignore[call-overload]
    except TypeError:
        return False


def likely_padding(entry: object) -> int | None:
    """The id that seems to fill the ends of a matrix's rows: of half of them, and twice in a quarter.

    A Ragged whose rows have equal lengths is a matrix, too. None for ids on a GPU, which would have to wait.
    """
    if isinstance(entry, Ragged) and entry.offsets is not None and entry.rows:
        width = entry.values.shape[0] // entry.rows
        regular = entry.values.is_cpu and bool((entry.offsets.diff() == width).all())
        matrix: object = entry.values.reshape(-1, width) if regular and width else None
    else:
        matrix = entry
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or not matrix.is_cpu or matrix.is_floating_point():
        return None
    rows, width = matrix.shape
    if rows < _FEWEST_ROWS or width < 2:
        return None
    last, mode = matrix[:, -1], int(matrix[:, -1].mode().values)
    ends = last == mode
    fills = int(ends.sum()) * 2 >= rows and int((ends & (matrix[:, -2] == mode)).sum()) * 4 >= rows
    return mode if fills and int((matrix[:, 0] == mode).sum()) * 2 < int(ends.sum()) else None


def absent_ids(batch: Mapping[str, Any]) -> Ragged | None:
    """No ids for any sample, for a feature that a batch lacks; None if the number of samples is unknown."""
    for entry in batch.values():
        if isinstance(entry, Ragged | NestedRagged) or (isinstance(entry, Tensor) and entry.dim()):
            rows = rows_of(entry)
            return Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(rows + 1, dtype=torch.int64))
    return None


def _check_tiles(refuse: Refuse, offsets: Tensor, count: int) -> None:
    if not _tiles(offsets, count):
        raise refuse(ValueError, f"offsets that rise from 0 to its {count} ids", f"{offsets.tolist()[:10]}")


def _tiles(offsets: Tensor, count: int) -> bool:
    return bool((offsets[0] == 0) & (offsets[-1] == count) & (offsets.diff() >= 0).all())


@functools.lru_cache(maxsize=64)
def _regular_offsets(samples: int, length: int, device: torch.device) -> Tensor:
    if not length:
        return torch.zeros(samples + 1, dtype=torch.int64, device=device)
    return torch.arange(0, samples * length + 1, length, device=device)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor on a device; what is there may have been made on another stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor.to(device, non_blocking=True)


# The features of an engine as the store needs them, and as JSON for embedding workers.


def make_program(features: Mapping[str, Table]) -> LookupProgram:
    """The program of some features, with their description."""
    return LookupProgram(
        [
            FeatureSpec(
                feature,
                table.name or feature,
                dim=table.dim,
                mode=_MODES.get(table.combiner, "pooled"),
                combiner=table.combiner if table.combiner in POOLED else "sum",
                stack=1 if table.hash_stack is None else table.hash_stack.rounds,
            )
            for feature, table in features.items()
        ],
        {feature: _to_json(feature, table) for feature, table in features.items()},
    )


def features_from_json(described: Mapping[str, Any]) -> dict[str, Table]:
    """The features of a program's description: the layout of their ids, without initialisers and policies."""
    tables = {}
    for feature, (name, dim, combiner, length, stack, *rest) in described.items():
        options = dict(zip(("use_weights", "missing", "padding_idx"), rest, strict=True))
        hash_stack = None if stack is None else HashStack(*stack)
        tables[feature] = Table(dim, name, combiner, length, hash_stack=hash_stack, **options)
    return tables


def _to_json(feature: str, table: Table) -> list[Any]:
    stack = None if table.hash_stack is None else [table.hash_stack.rounds, table.hash_stack.size]
    layout = [table.name or feature, table.dim, table.combiner, table.length, stack]
    return [*layout, table.use_weights, table.missing, table.padding_idx]
