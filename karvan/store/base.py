"""The store protocol: what the embedding engine needs from the holder of the rows.

A store sees distinct keys only. The engine groups a batch's ids by key before it asks (`LookupPlan`), pools
the vectors after, and sums gradients by key before it pushes them. `Store.forward` and `Store.update` do this
with the native grouping and the store's own `lookup` and `apply`; a store in the same process overrides them
with one native call each. What concerns one table apart from batches is in its `StoredTable`.

Between a lookup and its gradient a row may be evicted. A lookup therefore returns the tables' versions, a
push passes them back, and the store drops and counts gradients of rows that were removed in between, even if
their key has been inserted again since.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.native import _native
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Passes, Prepared
from karvan.store.types import (
    Capture,
    Counts,
    Found,
    Gradients,
    Keys,
    LookupContext,
    PerTable,
    Push,
    Rows,
    Rules,
    StalenessStats,
    TableSpec,
)


class StoredTable(ABC):
    """One table of a store, to inspect and maintain its rows; `Store.table` returns it.

    Where tables are spread over ranks, it is this rank's share of the table.
    """

    name: str

    @abstractmethod
    def set_state(self, initial: Sequence[float], fresh: bool) -> None:
        """Give rows the optimizer state `initial`; rows with state of that size keep it unless `fresh`."""

    @abstractmethod
    def skip(self) -> None:
        """Count an update that was skipped because its gradient was not finite."""

    @abstractmethod
    def evict(self, *, step: int, now: float) -> int:
        """Apply the table's policy now; returns how many rows were removed."""

    @abstractmethod
    def erase(self, keys: Keys) -> int:
        """Remove these keys; returns how many rows were removed."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all rows."""

    @property
    @abstractmethod
    def version(self) -> int:
        """A number that grows with every change of the table."""

    @abstractmethod
    def evicted_since(self, version: int) -> Keys:
        """Keys whose rows were removed after that version, including those that were inserted again."""

    @abstractmethod
    def snapshot(self, part: int = 0, parts: int = 1) -> Rows:
        """The rows whose key hash lies in the given one of `parts` equal ranges."""

    @abstractmethod
    def load(self, rows: Rows) -> None:
        """Insert or overwrite rows; those of other ranks are skipped."""

    @abstractmethod
    def extra(self) -> dict[str, NDArray[Any]]:
        """Copies of what a table holds in addition to rows, such as the counters of its admission filter."""

    @abstractmethod
    def load_extra(self, extra: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `extra` returned."""

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Counters: rows, bytes, inserted, evicted, rejected, dropped_gradients, skipped_updates, moved.

        `moved` counts index entries that growth has moved; while it rises, the index is growing.

        Tables on a GPU also have device_bytes and host_bytes, where their rows are, and of a host tier
        tier_hits and tier_misses, the distinct rows of training lookups that were on the GPU and in host
        memory, and tier_exchanges, the rows that have come to the GPU.
        """


class LocalTable(StoredTable):
    """A table whose rows this process holds: all of them, or those whose keys it owns.

    owns: says which of some keys belong here; None means all.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.owns: Callable[[Keys], NDArray[np.bool_]] | None = None

    @override
    def erase(self, keys: Keys) -> int:
        return self._erase(keys if self.owns is None else keys[self.owns(keys)])

    @abstractmethod
    def _erase(self, keys: Keys) -> int:
        """Remove keys that belong here."""

    @override
    def snapshot(self, part: int = 0, parts: int = 1) -> Rows:
        if not 0 <= part < parts:
            raise ValueError(f"Table '{self.name}': expected a part from 0 to {parts - 1}, got {part}.")
        return self._snapshot(part, parts)

    @abstractmethod
    def _snapshot(self, part: int, parts: int) -> Rows:
        """Read an existing part."""

    @override
    def load(self, rows: Rows) -> None:
        if self.owns is not None:
            mine = self.owns(rows.keys)
            rows = Rows._make(np.ascontiguousarray(array[mine]) for array in rows)
        if len(np.unique(rows.keys)) != len(rows.keys):
            raise ValueError(f"Table '{self.name}': the rows to load hold some keys twice.")
        self._load(rows)

    @abstractmethod
    def _load(self, rows: Rows) -> None:
        """Insert or overwrite rows of distinct keys that belong here."""


class Store(ABC):
    """Holds tables of rows.

    takes_references: whether it can embed batches whose ids are remote. takes_tensors: whether it takes ids
    as tensors (`FeatureTensors`), and groups and pools them itself; such a store overrides `prepare`,
    `forward`, whose plan has a `RemoteLookup`, `hold` and `update`. device: where it takes ids and gives
    vectors; that of a GPU has its index.
    """

    takes_references = False
    takes_tensors = False
    device = torch.device("cpu")

    @abstractmethod
    def add_table(self, spec: TableSpec) -> None:
        """Create the table, or do nothing if it exists; a different one of that name is an error."""

    @abstractmethod
    def table(self, name: str) -> StoredTable:
        """The table of that name, which was added before."""

    @abstractmethod
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        """Vectors of distinct keys; `keys` has, for each table, the keys and how often each occurs.

        Training inserts unknown keys; otherwise they get zeros and nothing changes.
        """

    @abstractmethod
    def apply(self, pushes: Mapping[str, Sequence[Push]], rules: Rules, steps: PerTable) -> None:
        """Update each table once with the sum of its pushes, without gradients of rows that were removed."""

    @abstractmethod
    def capture(
        self, tables: Sequence[str], parts: PerTable, since: PerTable | None = None, *, track: bool = False
    ) -> Capture:
        """The tables as they are now, read while training continues.

        parts: the number of parts of each table, a power of two. track: record what changes from now on, for
        the next capture. since: the `versions` of a capture that tracked; only what changed after it is
        captured, and a ValueError says that this is not known any more. A table has one capture at a time:
        close it before the next.
        """

    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """How many rows tables have."""
        return {table: self.table(table).stats()["rows"] for table in tables}

    @property
    def staleness(self) -> StalenessStats:
        """How far lookups have run ahead of gradients: not at all, unless a store overrides this."""
        return StalenessStats()

    @property
    def share(self) -> tuple[int, int]:
        """(r, n): it holds the part of every table that rank r of n owns; (0, 1) is everything."""
        return 0, 1

    def prepare(
        self, program: LookupProgram, inputs: LookupInputs, context: LookupContext | None = None
    ) -> Prepared:
        """Group a batch's keys before its `forward`; may run on another thread, at the same time as anything.

        inputs: the arrays of each feature, or its tensors if the store takes these, or a reference to ids
        that are remote.
        context: that of the forward, if it is known.
        """
        assert isinstance(inputs, list)
        return _native.prepare(program.native, inputs)

    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        """Look up a batch and fill its outputs.

        `inputs` are what `prepare` takes, or its result, which serves one forward.
        """
        if isinstance(inputs, _native.Plan):
            plan = inputs
        else:
            assert isinstance(inputs, list)
            plan = _native.Plan(program.native, inputs)
        keys = {table: plan.unique(slot) for slot, table in enumerate(program.tables)}
        rows = self.lookup(keys, context)
        plan.pool_from([rows[table].vectors for table in program.tables])
        return LookupPlan(plan, {table: f.version for table, f in rows.items()})

    def reduce(self, plan: LookupPlan, addresses: Sequence[int], strides: Sequence[int]) -> Gradients:
        """Sum gradients of a plan's outputs by key.

        addresses: of each output's gradient, 0 for none; strides: floats from one of its rows to the next.
        """
        assert plan.native is not None
        return plan.native.reduce(list(addresses), list(strides))

    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> Gradients:
        """Take the gradients of outputs of a `RemoteLookup`; for stores that take references or tensors.

        scale: by how much the gradients are too large; stores that take tensors divide by it. Those on a GPU
        take it as a float there, too, which they read when the gradients are applied.
        """
        raise TypeError(f"{type(self).__name__} takes gradients only for outputs that it has made.")

    def update(self, program: LookupProgram, gradients: Passes[Any], rules: Rules, steps: PerTable) -> None:
        """Apply the sum of backward passes, each a result of `reduce`, to the tables that have a rule."""
        pushes: dict[str, list[Push]] = {}
        for slot, table in enumerate(program.tables):
            if table not in rules:
                continue
            if not all(g.finite()[slot] for _, g in gradients):
                self.table(table).skip()
                continue
            pushes[table] = [_push(g, slot, plan.versions[table]) for plan, g in gradients]
        self.apply(pushes, rules, steps)


class SharedStore(Store):
    """A store whose rows are held by other processes, which write and read checkpoints themselves."""

    @abstractmethod
    def save_tables(
        self,
        capture: Capture,
        folder: str,
        tables: Mapping[str, Mapping[str, Any]],
        waiting: Callable[[], None],
        *,
        writers: int,
    ) -> list[dict[str, Any]]:
        """Have all holders write a capture into a folder; returns each holder's report on its tables.

        tables: for each its `optimizer`, the number of `parts`, whether it is a `delta`, and the id of the
        `base` that it adds to. waiting: called now and then until all have written. writers: how many threads
        of each holder write.
        """

    @abstractmethod
    def fill_tables(self, path: str, tables: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Have all holders empty these tables and read their rows from a checkpoint; returns what is damaged.

        Each damage is a file and what is wrong with it; if there is any, the tables are only partly filled.

        tables: for each whether to `keep` the optimizer state that was saved, the `initial` state otherwise,
        and whether to read `extra`, too.
        """


def clock_arrays(clock: Sequence[tuple[int, float]]) -> dict[str, NDArray[Any]]:
    """What a policy knows of time, (step, time) now and then, for `extra`."""
    steps, times = ([entry[part] for entry in clock] for part in (0, 1))
    return {"clock_steps": np.array(steps, np.int64), "clock_times": np.array(times)} if clock else {}


def clock_of(extra: Mapping[str, NDArray[Any]]) -> list[tuple[int, float]]:
    """The clock in the result of `extra`."""
    if "clock_steps" not in extra:
        return []
    return list(zip(extra["clock_steps"].tolist(), extra["clock_times"].tolist(), strict=True))


def _push(gradients: _native.Gradients, slot: int, version: int) -> Push:
    keys, values = gradients.keys_and_values(slot)
    return Push(keys, values, version)
