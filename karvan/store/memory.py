"""Rows in this process's memory: the default store.

`forward` and `update` are one native call each, which goes from row numbers to rows without a second lookup
of the keys. Results have the bits of the inherited ones, because groups, kernels and order are the same, also
where a step sums several backward passes: each has the version of its own lookup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from karvan.native import _native
from karvan.store.base import LocalTable, Store, clock_arrays, clock_of
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Passes, Prepared
from karvan.store.types import (
    Capture,
    Counts,
    Found,
    Keys,
    LookupContext,
    PerTable,
    Push,
    Rows,
    Rules,
    TableSpec,
)


class MemoryTable(LocalTable):
    """A table of the native core."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec.name)
        self.spec = spec
        self.native = _native.Table(
            spec.name, spec.dim, spec.dtype, spec.init, spec.seed, spec.admit, spec.evict, spec.shards
        )

    @override
    def set_state(self, initial: Sequence[float], fresh: bool) -> None:
        self.native.set_state(list(initial), fresh)

    @override
    def skip(self) -> None:
        self.native.count_skipped()

    @override
    def evict(self, *, step: int, now: float) -> int:
        return self.native.evict(step, now)

    @override
    def _erase(self, keys: Keys) -> int:
        return self.native.erase(np.ascontiguousarray(keys))

    @override
    def clear(self) -> None:
        self.native.clear()

    @property
    @override
    def version(self) -> int:
        return self.native.version

    @override
    def evicted_since(self, version: int) -> Keys:
        return self.native.evicted_since(version)

    @override
    def _snapshot(self, part: int, parts: int) -> Rows:
        return Rows(*self.native.snapshot(part, parts))

    @override
    def _load(self, rows: Rows) -> None:
        self.native.load(*rows)

    @override
    def extra(self, log: _native.LookupLog | None = None) -> dict[str, NDArray[Any]]:
        """Without the lookups in flight, which are in `log`."""
        arrays: dict[str, NDArray[Any]] = {}
        if len(counts := self.native.filter_counts(log)):
            arrays["filter_counts"] = counts
        return arrays | clock_arrays(self.native.clock())

    @override
    def load_extra(self, extra: Mapping[str, NDArray[Any]]) -> None:
        if "filter_counts" in extra:
            self.native.set_filter_counts(extra["filter_counts"])
        self.native.set_clock(clock_of(extra))

    @override
    def stats(self) -> dict[str, int]:
        return self.native.stats()


class MemoryStore(Store):
    """Native tables; a batch is one native call per direction.

    capacity: the rows of all tables together. A training lookup that exceeds it removes those that were used
    least recently, whatever their table: by the step of their last use, then by their number of uses.
    """

    def __init__(self, *, capacity: int | None = None) -> None:
        self._tables: dict[str, MemoryTable] = {}
        self._capacity = capacity
        self._by_name: list[_native.Table] = []  # replaced as a whole, since other threads read it

    @override
    def add_table(self, spec: TableSpec) -> None:
        existing = self._tables.get(spec.name)
        if existing is None:
            self._tables[spec.name] = MemoryTable(spec)
            self._by_name = [self._tables[name].native for name in sorted(self._tables)]
        elif existing.spec != spec:
            raise ValueError(
                f"Table '{spec.name}' is in the store already as {existing.spec}, but {spec} was asked for."
            )

    @override
    def table(self, name: str) -> MemoryTable:
        return self._tables[name]

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        training, step, now = context.training, context.step, context.now
        rows = {
            name: Found(*self._tables[name].native.lookup(unique, counts, training, step, now))
            for name, (unique, counts) in keys.items()
        }
        if training and self._capacity is not None:
            _native.shrink(self._by_name, self._capacity)
        return rows

    @override
    def apply(self, pushes: Mapping[str, Sequence[Push]], rules: Rules, steps: PerTable) -> None:
        for name, its_pushes in pushes.items():
            self._tables[name].native.apply(list(its_pushes), rules[name].native(), steps[name])

    @override
    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
        log: _native.LookupLog | None = None,
    ) -> Capture:
        """A row is copied when its part is read, or just before it changes.

        log: the lookups in flight, which the capture omits; see csrc/batch/lookup_log.h.
        """
        requests = [
            (self._tables[name].native, parts[name], None if since is None else since[name])
            for name in tables
        ]
        return _Captures(dict(zip(tables, _native.capture(requests, track, log), strict=True)))

    @override
    def forward(
        self,
        program: LookupProgram,
        inputs: LookupInputs | Prepared,
        context: LookupContext,
        log: _native.LookupLog | None = None,
    ) -> LookupPlan:
        """Grouping, lookup and pooling are one native call.

        log: records a training lookup, which is in flight from now on.
        """
        tables = [self._tables[name].native for name in program.tables]
        training, step, now = context.training, context.step, context.now
        if isinstance(inputs, _native.Plan):
            plan = inputs
            _native.forward_prepared(plan, tables, training, step, now)
        else:
            assert isinstance(inputs, list)
            plan = _native.forward(program.native, tables, inputs, training, step, now, log)
        if training and self._capacity is not None:
            _native.shrink(self._by_name, self._capacity)
        return LookupPlan(plan, {})

    @override
    def update(
        self, program: LookupProgram, gradients: Passes[_native.Gradients], rules: Rules, steps: PerTable
    ) -> None:
        """The rows are found by their addresses from the lookup, not by their keys."""
        passes = [g for _, g in gradients]
        total = passes[0] if len(passes) == 1 else _native.Gradients.merge(passes)
        distinct = {id(rule): rule for rule in rules.values()}  # many tables share one
        native_rules = {key: rule.native() for key, rule in distinct.items()}
        total.apply(
            [native_rules[id(rules[name])] if name in rules else None for name in program.tables],
            [steps.get(name, 0) for name in program.tables],
        )


class _Captures(Capture):
    """Native captures of some tables, all of one moment."""

    def __init__(self, captures: Mapping[str, _native.Capture]) -> None:
        self._captures = captures
        self.versions = {name: capture.version for name, capture in captures.items()}

    @override
    def part(self, table: str, part: int) -> Rows:
        return Rows(*self._captures[table].part(part))

    @override
    def erased(self, table: str) -> Keys:
        return self._captures[table].erased()

    @override
    def close(self) -> None:
        for capture in self._captures.values():
            capture.close()
