"""`PlacedStore`: some tables in the memory of the machine, the others on a GPU, in one engine.

Vectors of all tables are on the GPU. Those of tables in memory are looked up by the native core and copied
there, and their gradients are copied back; both wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from karvan.native import _native
from karvan.store.base import Store, StoredTable
from karvan.store.program import (
    FeatureTensors,
    LookupInputs,
    LookupPlan,
    LookupProgram,
    OutputLayout,
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
    Push,
    Rows,
    Rule,
    TableSpec,
)


class _Half(NamedTuple):
    """The features of an engine whose tables are in one of the two stores."""

    program: LookupProgram
    features: list[int]  # their numbers in the engine
    slots: list[int]  # of the tables in the engine, by their slots in this program


class _Batch:
    """A batch before its lookup."""

    plan = None

    def __init__(
        self, host: list[FeatureTensors], device: Prepared | None, layouts: list[OutputLayout]
    ) -> None:
        self.host = host
        self.device = device
        self.layouts = layouts


class _PlacedLookup(RemoteLookup):
    """A batch after its lookup in both stores."""

    plan = None

    def __init__(
        self,
        halves: tuple[_Half, _Half],
        plans: tuple[LookupPlan | None, LookupPlan | None],
        outs: dict[int, Tensor],
        layouts: list[OutputLayout],
        tensors: list[FeatureTensors],
    ) -> None:
        self.halves, self.plans, self.held = halves, plans, tensors
        self._outs, self._layouts = outs, layouts

    @override
    def take(self) -> list[tuple[Tensor, OutputLayout]]:
        outs, self._outs = self._outs, {}
        return [(outs[number], layout) for number, layout in enumerate(self._layouts)]


class PlacedGradients(GradientFlags):
    """The gradients of both halves of a batch."""

    def __init__(
        self,
        finite: list[bool],
        touched: list[bool],
        halves: tuple[tuple[LookupPlan, Gradients] | None, ...],
        slots: tuple[list[int], ...],
    ) -> None:
        super().__init__(finite, touched)
        self.halves = halves
        self._slots = slots

    def check_finite(self) -> list[bool]:
        """Say of each table whether its gradients are finite; this waits for the device."""
        finite = list(self.finite())
        for half, slots in zip(self.halves, self._slots, strict=True):
            if half is not None:
                check = getattr(half[1], "check_finite", half[1].finite)
                for slot, good in zip(slots, check(), strict=False):
                    finite[slot] &= good
        return finite


class PlacedStore(Store):
    """Two stores; places: "cpu" or "cuda" for each table."""

    def __init__(self, host: Store, device: Store, places: Mapping[str, str]) -> None:
        self._stores = {"cpu": host, "cuda": device}
        self._places = dict(places)
        self._halves: dict[LookupProgram, tuple[_Half, _Half]] = {}

    def of(self, table: str) -> Store:
        """The store that has a table."""
        return self._stores[self._places[table]]

    @property
    @override
    def device(self) -> torch.device:
        return self._stores["cuda"].device

    @property
    @override
    def takes_tensors(self) -> bool:
        return True

    def _split(self, program: LookupProgram) -> tuple[_Half, _Half]:
        if program not in self._halves:
            slot_of = {name: slot for slot, name in enumerate(program.tables)}
            halves = []
            for place in ("cpu", "cuda"):
                numbers = [n for n, f in enumerate(program.features) if self._places[f.table] == place]
                host_program = LookupProgram([program.features[n] for n in numbers])
                halves.append(_Half(host_program, numbers, [slot_of[name] for name in host_program.tables]))
            self._halves[program] = (halves[0], halves[1])
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
        device_batch = self._stores["cuda"].prepare(device.program, on_device, context)
        return _Batch(host_inputs, device_batch, layouts)

    @override
    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        batch = self.prepare(program, inputs) if isinstance(inputs, tuple) else inputs
        assert isinstance(batch, _Batch)
        halves = self._split(program)
        host, device = halves
        for layout in batch.layouts:
            if layout.offsets is not None and layout.offsets.is_cuda:  # perhaps made on another stream
                layout.offsets.record_stream(torch.cuda.current_stream(self.device))
        plans: list[LookupPlan | None] = [None, None]
        outs: dict[int, Tensor] = {}
        if device.features:
            assert batch.device is not None
            plans[1] = device_plan = self._stores["cuda"].forward(device.program, batch.device, context)
            remote = cast(RemoteLookup, device_plan.remote)
            outs |= dict(zip(device.features, (out for out, _ in remote.take()), strict=True))
        if host.features:
            specs = host.program.features
            outputs = [
                torch.empty(_out_rows(spec.mode, tensors.layout), spec.dim)
                for spec, tensors in zip(specs, batch.host, strict=True)
            ]
            arrays = [_arrays(tensors, out) for tensors, out in zip(batch.host, outputs, strict=True)]
            plans[0] = self._stores["cpu"].forward(host.program, arrays, context)
            outs |= dict(zip(host.features, (_to_device(out, self.device) for out in outputs), strict=True))
        versions = {name: self.table(name).version for name in program.tables}
        lookup = _PlacedLookup(halves, (plans[0], plans[1]), outs, batch.layouts, batch.host)
        return LookupPlan(None, versions, lookup)

    @override
    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> PlacedGradients:
        lookup = plan.remote
        assert isinstance(lookup, _PlacedLookup)
        slots = 1 + max(slot for half in lookup.halves for slot in half.slots)
        finite, touched = [True] * slots, [False] * slots
        halves: list[tuple[LookupPlan, Gradients] | None] = [None, None]
        for number, (half, half_plan) in enumerate(zip(lookup.halves, lookup.plans, strict=True)):
            if half_plan is None:
                continue
            mine = [gradients[n] for n in half.features]
            if number == 1:
                sums: Gradients = self._stores["cuda"].hold(half_plan, mine, scale)
            else:
                host_gradients = [None if g is None else (g / scale).cpu().contiguous() for g in mine]
                addresses = [0 if g is None else g.data_ptr() for g in host_gradients]
                strides = [0 if g is None else g.stride(0) for g in host_gradients]
                sums = self._stores["cpu"].reduce(half_plan, addresses, strides)
            halves[number] = half_plan, sums
            for slot, good, any_ in zip(half.slots, sums.finite(), sums.touched(), strict=False):
                finite[slot], touched[slot] = good, any_
        return PlacedGradients(finite, touched, tuple(halves), tuple(half.slots for half in lookup.halves))

    @override
    def update(
        self,
        program: LookupProgram,
        gradients: Sequence[tuple[LookupPlan, Any]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        for number, (half, place) in enumerate(zip(self._split(program), ("cpu", "cuda"), strict=True)):
            passes = [half.halves[number] for _, half in gradients if half.halves[number] is not None]
            place_rules = {name: rule for name, rule in rules.items() if self._places[name] == place}
            if passes and place_rules:
                self._stores[place].update(
                    half.program, passes, place_rules, {name: steps[name] for name in place_rules}
                )

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        rows: dict[str, Found] = {}
        for place, store in self._stores.items():
            place_keys = {name: asked for name, asked in keys.items() if self._places[name] == place}
            rows |= store.lookup(place_keys, context) if place_keys else {}
        return rows

    @override
    def apply(
        self,
        pushes: Mapping[str, Sequence[Push]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
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
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        captures = {}
        for place, store in self._stores.items():
            if place_tables := [name for name in tables if self._places[name] == place]:
                captures[place] = store.capture(place_tables, parts, since, track=track)
        return _PlacedCaptures(captures, self._places)


class _PlacedCaptures(Capture):
    """Captures of both stores."""

    def __init__(self, captures: Mapping[str, Capture], places: Mapping[str, str]) -> None:
        self._captures, self._places = captures, places
        self.versions = {name: v for capture in captures.values() for name, v in capture.versions.items()}

    @override
    def part(self, table: str, part: int) -> Rows:
        return self._captures[self._places[table]].part(table, part)

    @override
    def erased(self, table: str) -> Keys:
        return self._captures[self._places[table]].erased(table)

    @override
    def close(self) -> None:
        for capture in self._captures.values():
            capture.close()


def _to_host(tensors: FeatureTensors) -> FeatureTensors:
    layout = tensors.layout
    offsets = None if layout.offsets is None else layout.offsets.cpu()
    weights = None if tensors.weights is None else tensors.weights.cpu()
    return FeatureTensors(tensors.keys.cpu(), weights, layout._replace(offsets=offsets))


def _to_device(out: Tensor, device: torch.device) -> Tensor:
    return out.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else out


def _out_rows(mode: str, layout: OutputLayout) -> int:
    if mode == "cells":
        return layout.ids
    return layout.samples * layout.length if mode == "padded" else layout.samples


def _arrays(tensors: FeatureTensors, out: Tensor) -> _native.FeatureArrays:
    layout = tensors.layout
    return _native.FeatureArrays(
        values=tensors.keys.data_ptr(),
        cells=layout.ids,
        samples=layout.samples,
        out=out.data_ptr(),
        offsets=0 if layout.offsets is None else layout.offsets.data_ptr(),
        weights=0 if tensors.weights is None else tensors.weights.data_ptr(),
        length=layout.length,
    )
