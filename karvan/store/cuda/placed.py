"""`PlacedStore`: some tables in the memory of the machine, the others on a GPU, in one engine.

Vectors of all tables are on the GPU. Those of tables in memory are looked up by the native core and copied
there, and their gradients are copied back; both wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from karvan.store.base import Store, StoredTable
from karvan.store.program import (
    FeatureTensors,
    LookupInputs,
    LookupPlan,
    LookupProgram,
    MadeOutputs,
    OutputLayout,
    Passes,
    Prepared,
    RemoteLookup,
)
from karvan.store.types import (
    Capture,
    Counts,
    Found,
    GradientFlags,
    Gradients,
    Keys,
    LookupContext,
    PerTable,
    Push,
    Rows,
    Rules,
    TableSpec,
)


class _Half(NamedTuple):
    """The features of an engine whose tables are in one of the two stores."""

    place: str
    store: Store
    program: LookupProgram
    features: list[int]  # their numbers in the engine
    slots: list[int]  # of the tables in the engine, by their slots in this program


class _Batch(NamedTuple):
    """A batch before its lookup."""

    host: list[FeatureTensors]
    device: Prepared
    layouts: list[OutputLayout]
    plan: None = None


@dataclass(eq=False)
class _PlacedLookup(MadeOutputs):
    """A batch after its lookup in the stores that have tables of it; held: what the native plan points to."""

    plans: list[tuple[_Half, LookupPlan]]
    held: list[FeatureTensors]
    tables: int


@dataclass(eq=False)
class PlacedGradients(GradientFlags):
    """The gradients of both halves of a batch, by their places."""

    halves: dict[str, tuple[_Half, LookupPlan, Gradients]]

    def check_finite(self) -> list[bool]:
        """Say of each table whether its gradients are finite; this waits for the device."""
        finite = list(self.finite())
        for half, _, sums in self.halves.values():
            for slot, good in zip(half.slots, getattr(sums, "check_finite", sums.finite)(), strict=False):
                finite[slot] &= good
        return finite


class PlacedStore(Store):
    """Two stores; places: "cpu" or "cuda" for each table."""

    takes_tensors = True

    def __init__(self, host: Store, device: Store, places: Mapping[str, str]) -> None:
        self._stores = {"cpu": host, "cuda": device}
        self.device = device.device
        self._places = dict(places)
        self._halves: dict[LookupProgram, list[_Half]] = {}

    def of(self, table: str) -> Store:
        """The store that has a table."""
        return self._stores[self._places[table]]

    def _split(self, program: LookupProgram) -> list[_Half]:
        """The halves of a program: the host's, then the device's."""
        if program not in self._halves:
            halves = self._halves[program] = []
            for place, store in self._stores.items():
                numbers = [n for n, f in enumerate(program.features) if self._places[f.table] == place]
                part = LookupProgram([program.features[n] for n in numbers])
                slots = [program.tables.index(name) for name in part.tables]
                halves.append(_Half(place, store, part, numbers, slots))
        return self._halves[program]

    @override
    def prepare(
        self, program: LookupProgram, inputs: LookupInputs, context: LookupContext | None = None
    ) -> Prepared:
        """Ids go to where their tables are."""
        assert isinstance(inputs, tuple)
        host, device = self._split(program)
        host_inputs = [_to_host(inputs[number]) for number in host.features]
        layouts = [  # before the device's part, whose event comes after them
            tensors.layout
            if tensors.layout.offsets is None
            else tensors.layout._replace(offsets=tensors.layout.offsets.to(self.device, non_blocking=True))
            for tensors in inputs
        ]
        on_device = tuple(inputs[n] for n in device.features)
        return _Batch(host_inputs, device.store.prepare(device.program, on_device, context), layouts)

    @override
    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        batch = inputs if isinstance(inputs, _Batch) else self.prepare(program, cast(LookupInputs, inputs))
        assert isinstance(batch, _Batch)
        host, device = self._split(program)
        for layout in batch.layouts:
            if layout.offsets is not None and layout.offsets.is_cuda:  # perhaps made on another stream
                layout.offsets.record_stream(torch.cuda.current_stream(self.device))
        plans: list[tuple[_Half, LookupPlan]] = []
        outs: dict[int, Tensor] = {}
        if device.features:
            plan = device.store.forward(device.program, batch.device, context)
            plans.append((device, plan))
            outs |= zip(
                device.features, (out for out, _ in cast(RemoteLookup, plan.remote).take()), strict=True
            )
        if host.features:
            specs = host.program.features
            outputs = [
                torch.empty(tensors.layout.rows(spec.mode), spec.dim)
                for spec, tensors in zip(specs, batch.host, strict=True)
            ]
            arrays = [tensors.arrays(out) for tensors, out in zip(batch.host, outputs, strict=True)]
            plans.append((host, host.store.forward(host.program, arrays, context)))
            outs |= zip(host.features, (_to_device(out, self.device) for out in outputs), strict=True)
        versions = {name: self.table(name).version for name in program.tables}
        lookup = _PlacedLookup(outs, batch.layouts, plans, batch.host, len(program.tables))
        return LookupPlan(None, versions, lookup)

    @override
    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> PlacedGradients:
        lookup = plan.remote
        assert isinstance(lookup, _PlacedLookup)
        finite, touched = [True] * lookup.tables, [False] * lookup.tables
        halves: dict[str, tuple[_Half, LookupPlan, Gradients]] = {}
        for half, half_plan in lookup.plans:
            mine = [gradients[n] for n in half.features]
            if half.store.takes_tensors:
                sums: Gradients = half.store.hold(half_plan, mine, scale)
            else:
                on_host = [None if g is None else (g / scale).cpu().contiguous() for g in mine]
                addresses = [0 if g is None else g.data_ptr() for g in on_host]
                strides = [0 if g is None else g.stride(0) for g in on_host]
                sums = half.store.reduce(half_plan, addresses, strides)
            halves[half.place] = half, half_plan, sums
            for slot, good, any_ in zip(half.slots, sums.finite(), sums.touched(), strict=False):
                finite[slot], touched[slot] = good, any_
        return PlacedGradients(finite, touched, halves)

    @override
    def update(self, program: LookupProgram, gradients: Passes[Any], rules: Rules, steps: PerTable) -> None:
        for half in self._split(program):
            passes = [sums.halves[half.place][1:] for _, sums in gradients if half.place in sums.halves]
            place_rules = {name: rule for name, rule in rules.items() if self._places[name] == half.place}
            if passes and place_rules:
                place_steps = {name: steps[name] for name in place_rules}
                half.store.update(half.program, passes, place_rules, place_steps)

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        rows: dict[str, Found] = {}
        for store, names in self._by_store(keys):
            rows |= store.lookup({name: keys[name] for name in names}, context)
        return rows

    @override
    def apply(self, pushes: Mapping[str, Sequence[Push]], rules: Rules, steps: PerTable) -> None:
        for name, listed in pushes.items():
            self.of(name).apply({name: listed}, rules, steps)

    @override
    def add_table(self, spec: TableSpec) -> None:
        self.of(spec.name).add_table(spec)

    @override
    def table(self, name: str) -> StoredTable:
        return self.of(name).table(name)

    @override
    def capture(
        self, tables: Sequence[str], parts: PerTable, since: PerTable | None = None, *, track: bool = False
    ) -> Capture:
        captures: dict[str, Capture] = {}
        for store, names in self._by_store(tables):
            captures |= dict.fromkeys(names, store.capture(names, parts, since, track=track))
        return _PlacedCaptures(captures)

    def _by_store(self, tables: Iterable[str]) -> Iterator[tuple[Store, list[str]]]:
        """The stores that have some of these tables, with those."""
        for store in self._stores.values():
            if names := [name for name in tables if self.of(name) is store]:
                yield store, names


class _PlacedCaptures(Capture):
    """Captures of both stores, by table."""

    def __init__(self, captures: Mapping[str, Capture]) -> None:
        self._captures = captures
        self.versions = {name: capture.versions[name] for name, capture in captures.items()}

    @override
    def part(self, table: str, part: int) -> Rows:
        return self._captures[table].part(table, part)

    @override
    def erased(self, table: str) -> Keys:
        return self._captures[table].erased(table)

    @override
    def close(self) -> None:
        for capture in dict.fromkeys(self._captures.values()):
            capture.close()


def _to_host(tensors: FeatureTensors) -> FeatureTensors:
    layout = tensors.layout
    offsets = None if layout.offsets is None else layout.offsets.cpu()
    weights = None if tensors.weights is None else tensors.weights.cpu()
    return FeatureTensors(tensors.keys.cpu(), weights, layout._replace(offsets=offsets))


def _to_device(out: Tensor, device: torch.device) -> Tensor:
    return out.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else out
