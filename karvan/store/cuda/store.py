"""`CudaStore`: tables in the memory of a GPU.

A training step is a few kernels for all tables together, queued without waiting for the device: find and
insert rows, fill outputs, group positions by row beside that, then sum gradients and update rows at once.
Results are the same from run to run: sums have the order of the batch.

Kernels read all addresses and sizes from descriptors in device memory, so the launches of a step are the same
for every batch of about the same shape, and are replayed as CUDA graphs. The host never waits to learn how
many rows there are: it works with upper bounds (`rows/bounds.py`). Rows of one layout are numbered over all
tables, and note the version of their birth: by it a gradient of an erased row is recognised even if its
number belongs to another key, or another table, by now.

Unlike in memory, a gradient that is not finite skips its row, not its table: to check all gradients first
would read them twice. A table at the capacity of its policy waits for its lookup before the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.store.base import Store
from karvan.store.capture import Capture
from karvan.store.cuda.batch import lookup as launches
from karvan.store.cuda.batch.batch_ids import FeatureIds, FeatureShape, GroupLayout, shape_of_keys
from karvan.store.cuda.batch.batches import (
    DeviceBatches,
    DeviceGradients,
    DeviceInputs,
    DeviceLookup,
    as_gradients,
)
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.batch.gradients import GroupGradients, GroupLookup, update_group
from karvan.store.cuda.batch.updates import SlotRules, check_state
from karvan.store.cuda.captures.device_capture import DeviceCapture
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.rows import contents, policies
from karvan.store.cuda.rows.memory_errors import MemoryReport
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.rows.tables import DeviceTable
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Prepared
from karvan.store.types import Counts, Found, Keys, Push, Rows, Rule, TableSpec


class CudaStore(Store):
    """Tables on one device; on "cpu" the kernels run in Triton's interpreter, for tests.

    device_memory: the most bytes that rows take on the device. Rows beyond it are in the memory of the
    machine, where the kernels read and write them as well, and hot ones come to the device (`tier/`).
    """

    def __init__(self, device: torch.device | str = "cuda", device_memory: int | None = None) -> None:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
        self.memory = TableMemory(chosen, device_memory)  # tables, rows and counters
        self._batches = DeviceBatches(self.memory)

    @property
    @override
    def device(self) -> torch.device:
        return self.memory.device

    @property
    @override
    def takes_tensors(self) -> bool:
        return True

    @override
    def add_table(self, spec: TableSpec) -> None:
        self.memory.add(spec)

    @override
    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        its = self._table(table)
        same = len(initial) == its.arena.layout.state
        self.memory.set_initial_state(its, initial)
        if same and not fresh:
            return
        self.memory.learn_now()
        rows = self.snapshot(table) if self.memory.rows_bound(its) else None
        if rows is not None:
            state = np.tile(np.array(initial, np.float32), (len(rows.keys), 1))
            rows = rows._replace(state=np.ascontiguousarray(state.reshape(len(rows.keys), len(initial))))
            self._empty(its)
        its.move_to(self.memory.arena(its.arena.layout._replace(state=len(initial))))
        self.memory.set_initial_state(its, initial)
        if rows is not None:
            contents.load_rows(self.memory, its, rows)
            its.erasures.newest = its.version  # rows have other numbers now
            self.memory.own_counters(its)[fields.INSERTED.value] -= len(rows.keys)
            self.memory.learn_now()

    def _table(self, name: str) -> DeviceTable:
        with MemoryReport(self.memory):
            policies.settle(self.memory)
        return self.memory.tables[name]

    def _empty(self, table: DeviceTable) -> None:
        """Release all rows of a table, and its index, without a note of the keys."""
        memory = self.memory
        memory.tier.join()  # it reads the index
        noted = contents.list_rows(memory, table)
        evicted = memory.own_counters(table)[fields.EVICTED.value].clone()
        contents.erase_hashes(memory, table, noted.hashes, log=False)
        own = memory.own_counters(table)
        own[fields.EVICTED.value] = evicted
        own[fields.USED.value].zero_()
        table.index = type(table.index)(memory.device)
        table.used.restart(0, memory.counters.time, memory.counters.time + 1)
        table.room = 0
        memory.learn_now()

    @override
    def prepare(
        self,
        program: LookupProgram,
        inputs: LookupInputs,
        *,
        training: bool | None = None,
        step: int = 0,
        now: float = 0.0,
    ) -> Prepared:
        """Moves ids to the device."""
        assert isinstance(inputs, tuple)
        batch = self._batches.prepare(program, inputs)
        self._batches.expect(batch, training=bool(training))
        return batch

    def expect(self, batch: DeviceInputs) -> None:
        """A batch was made on the current stream for a training lookup, which comes after some others."""
        self._batches.expect(batch, training=True)

    @override
    def forward(
        self,
        program: LookupProgram,
        inputs: LookupInputs | Prepared,
        *,
        training: bool,
        step: int,
        now: float,
    ) -> LookupPlan:
        if isinstance(inputs, tuple):
            batch = self._batches.prepare(program, inputs)
        else:
            assert isinstance(inputs, DeviceInputs)
            batch = inputs
        lookup = self._batches.look_up(batch, training=training, step=step, now=now)
        return LookupPlan(None, lookup.versions, lookup)

    @override
    def hold(
        self, plan: LookupPlan, gradients: Sequence[Tensor | None], scale: float | Tensor = 1.0
    ) -> DeviceGradients:
        assert isinstance(plan.remote, DeviceLookup)
        return self._batches.hold(plan.remote, gradients, scale)

    @override
    def update(
        self,
        program: LookupProgram,
        gradients: Sequence[tuple[LookupPlan, Any]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        self._batches.update(program.tables, [as_gradients(held) for _, held in gradients], rules, steps)

    @override
    def lookup(
        self, keys: Mapping[str, tuple[Keys, Counts]], *, training: bool, step: int, now: float
    ) -> dict[str, Found]:
        device = self.device
        uses = {
            number: torch.from_numpy(np.ascontiguousarray(counts, np.uint32).view(np.int32)).to(device)
            for number, (_, counts) in enumerate(keys.values())
        }
        shapes, ids = [], []
        for slot, (name, (unique, _)) in enumerate(keys.items()):
            shapes.append(shape_of_keys(slot, self._table(name), len(unique)))
            ids.append(self._ids_of(unique))
        batch = self.inputs_of(shapes, ids, uses)
        found = self._batches.look_up(batch, training=training, step=step, now=now)
        return {
            name: Found(out.cpu().numpy(), self.version(name))
            for name, (out, _) in zip(keys, found.take(), strict=True)
        }

    def _ids_of(self, keys: Keys) -> FeatureIds:
        return FeatureIds(torch.from_numpy(np.ascontiguousarray(keys, np.int64)).to(self.device))

    def inputs_of(
        self,
        shapes: Sequence[FeatureShape],
        ids: Sequence[FeatureIds],
        uses: Mapping[int, Tensor] | None = None,
        outs: Mapping[int, Tensor] | None = None,
    ) -> DeviceInputs:
        """The inputs of a batch as the kernels take them."""
        return self._batches.inputs_of(shapes, ids, uses, outs)

    @override
    def apply(
        self,
        pushes: Mapping[str, Sequence[Push]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        for name, its in pushes.items():
            table = self._table(name)
            check_state(table, rules[name])
            passes = [self._of_push(table, push) for push in its if len(push.keys)]
            if passes:
                update_group(passes, SlotRules([rules[name]], [steps[name]]))
            table.next_version()

    def _of_push(self, table: DeviceTable, push: Push) -> GroupGradients:
        """A push as gradients of a lookup, whose keys without a row are counted as dropped."""
        memory, ids = self.memory, self._ids_of(push.keys)
        layout = GroupLayout(table.arena, [(0, shape_of_keys(0, table, len(push.keys)))], False)
        descriptors = layout.describe([ids])
        buffers = LookupBuffers(memory, table.arena, layout.shape)
        buffers.load(layout, descriptors, 0)
        launches.find(buffers, grows=table.index.grows)
        absent = (buffers.rows[: len(push.keys)] == 0).sum()
        memory.own_counters(table)[fields.DROPPED.value] += absent
        launches.group_runs(buffers, uses=False)
        gradient = torch.from_numpy(np.ascontiguousarray(push.gradients, np.float32)).to(memory.device)
        found = GroupLookup(layout, push.version, descriptors, buffers, None, {})
        return GroupGradients(found, {0: gradient}, 1.0)

    @override
    def skip(self, table: str) -> None:
        self._table(table).skipped += 1

    @override
    def evict(self, table: str, *, step: int, now: float) -> int:
        return policies.evict(self.memory, self._table(table), step, now)

    @override
    def erase(self, table: str, keys: Keys) -> int:
        hashes = torch.from_numpy(contents.mix(np.unique(np.asarray(keys, np.int64)))).to(self.device)
        return contents.erase_hashes(self.memory, self._table(table), hashes)

    @override
    def clear(self, table: str) -> None:
        its = self._table(table)
        noted = contents.list_rows(self.memory, its)
        self._empty(its)
        its.erasures.add(its.next_version(), noted.hashes, 1 << 62)
        self.memory.own_counters(its)[fields.EVICTED.value] += noted.rows.numel()
        if its.filter is not None:
            its.filter.zero_()

    @override
    def version(self, table: str) -> int:
        return self._table(table).version

    @override
    def evicted_since(self, table: str, version: int) -> Keys:
        return contents.erased_keys(self._table(table), version)

    @override
    def snapshot(self, table: str, part: int = 0, parts: int = 1) -> Rows:
        if not 0 <= part < parts:
            raise ValueError(f"Table '{table}': expected a part from 0 to {parts - 1}, got {part}.")
        low, high = (-(-(p << 64) // parts) for p in (part, part + 1))
        its = self._table(table)
        return contents.to_host(self.memory, its, contents.list_rows(self.memory, its, low, high - 1))

    @override
    def load(self, table: str, rows: Rows) -> None:
        if len(np.unique(rows.keys)) != len(rows.keys):
            raise ValueError(f"Table '{table}': the rows to load hold some keys twice.")
        its, count = self._table(table), len(rows.keys)
        layout = its.arena.layout
        for what, array, floats in (
            ("vectors", rows.vectors, layout.dim),
            ("state", rows.state, layout.state),
        ):
            if array.shape != (count, floats):
                raise ValueError(
                    f"Table '{table}': expected {what} of shape ({count}, {floats}), got {array.shape}."
                )
        with MemoryReport(self.memory):
            contents.load_rows(self.memory, its, rows)

    @override
    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        """Waits for a list of the rows, not for the rows. Changes are always tracked."""
        with MemoryReport(self.memory):
            return DeviceCapture(self.memory, {name: self._table(name) for name in tables}, parts, since)

    @override
    def extra(self, table: str) -> dict[str, NDArray[Any]]:
        its = self._table(table)
        made: dict[str, NDArray[Any]] = {}
        if its.filter is not None:
            made["filter_counts"] = its.filter.clamp(max=255).to(torch.uint8).cpu().numpy()
        if its.clock:
            made["clock_steps"] = np.array([step for step, _ in its.clock], dtype=np.int64)
            made["clock_times"] = np.array([time for _, time in its.clock])
        return made

    @override
    def load_extra(self, table: str, extra: Mapping[str, NDArray[Any]]) -> None:
        its = self._table(table)
        if "filter_counts" in extra and its.filter is not None:
            counts = torch.from_numpy(np.ascontiguousarray(extra["filter_counts"]))
            if counts.numel() != its.filter.numel():
                raise ValueError(
                    f"Table '{table}': expected {its.filter.numel()} counters of its filter, got "
                    f"{counts.numel()}."
                )
            its.filter.copy_(counts)
        steps = extra["clock_steps"].tolist() if "clock_steps" in extra else []
        times = extra["clock_times"].tolist() if "clock_times" in extra else []
        its.clock = list(zip(steps, times, strict=True))

    @override
    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """Waits for the device once."""
        chosen = {name: self._table(name).number for name in tables}  # first: rows may have to go
        counters = self.memory.learn_now().reshape(-1, fields.COUNTERS.value)
        return {name: int(counters[number, fields.ROWS.value]) for name, number in chosen.items()}

    @override
    def stats(self, table: str) -> dict[str, int]:
        """Waits for the device."""
        its = self._table(table)
        own = self.memory.learn_now()[its.number * fields.COUNTERS.value :]
        size, on_host = self.memory.bytes(its), contents.host_bytes(self.memory, its)
        return {
            "rows": int(own[fields.ROWS.value]),
            "bytes": size,
            "inserted": int(own[fields.INSERTED.value]),
            "evicted": int(own[fields.EVICTED.value]),
            "rejected": int(own[fields.REJECTED.value]),
            "dropped_gradients": int(own[fields.DROPPED.value]),
            "skipped_updates": int(own[fields.SKIPPED.value]) + its.skipped,
            "moved": its.index.moved_in_all,
            "device_bytes": size - on_host,
            "host_bytes": on_host,
            "tier_hits": int(own[fields.TIER_HITS.value]),
            "tier_misses": int(own[fields.TIER_MISSES.value]),
            "tier_exchanges": int(own[fields.TIER_EXCHANGES.value]),
        }
