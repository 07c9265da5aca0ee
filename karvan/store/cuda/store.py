"""`CudaStore`: tables in the memory of a GPU.

A training step is a few kernels for all tables together, queued without waiting for the device: find and
insert rows, fill outputs, group positions by row beside that, then sum gradients and update rows at once.
Results are the same from run to run: sums have the order of the batch.

Kernels read all addresses and sizes from descriptors in device memory, so the launches of a step are the same
for every batch of about the same shape, and are replayed as CUDA graphs. The host never waits to learn how
many rows there are: it works with upper bounds (`rows/arena.py`). Rows of one layout are numbered over all
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
from torch import Tensor
from typing_extensions import override

from karvan.store.base import Store
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
from karvan.store.cuda.captures import DeviceCapture
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.rows.memory_errors import MemoryReport
from karvan.store.cuda.rows.table_memory import TableMemory
from karvan.store.cuda.rows.tables import DeviceTable
from karvan.store.cuda.table import CudaTable
from karvan.store.program import LookupInputs, LookupPlan, LookupProgram, Prepared
from karvan.store.types import Capture, Counts, Found, Keys, LookupContext, Push, Rule, TableSpec


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
        self._tables: dict[str, CudaTable] = {}

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
        if spec.name not in self._tables:
            self._tables[spec.name] = CudaTable(self.memory, self.memory.tables[spec.name])

    @override
    def table(self, name: str) -> CudaTable:
        return self._tables[name]

    @override
    def prepare(
        self, program: LookupProgram, inputs: LookupInputs, context: LookupContext | None = None
    ) -> Prepared:
        """Moves ids to the device."""
        assert isinstance(inputs, tuple)
        batch = self._batches.prepare(program, inputs)
        self._batches.expect(batch, training=context is not None and context.training)
        return batch

    def expect(self, batch: DeviceInputs) -> None:
        """A batch was made on the current stream for a training lookup, which comes after some others."""
        self._batches.expect(batch, training=True)

    @override
    def forward(
        self, program: LookupProgram, inputs: LookupInputs | Prepared, context: LookupContext
    ) -> LookupPlan:
        if isinstance(inputs, tuple):
            batch = self._batches.prepare(program, inputs)
        else:
            assert isinstance(inputs, DeviceInputs)
            batch = inputs
        lookup = self._batches.look_up(batch, context)
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
        self._batches.update(
            program.tables, [as_gradients(gradient) for _, gradient in gradients], rules, steps
        )

    @override
    def lookup(self, keys: Mapping[str, tuple[Keys, Counts]], context: LookupContext) -> dict[str, Found]:
        device = self.device
        uses = {
            number: torch.from_numpy(np.ascontiguousarray(counts, np.uint32).view(np.int32)).to(device)
            for number, (_, counts) in enumerate(keys.values())
        }
        shapes, ids = [], []
        for slot, (name, (unique, _)) in enumerate(keys.items()):
            shapes.append(shape_of_keys(slot, self.table(name).settled, len(unique)))
            ids.append(self._ids_of(unique))
        batch = self.inputs_of(shapes, ids, uses)
        lookup = self._batches.look_up(batch, context)
        return {
            name: Found(out.cpu().numpy(), self.table(name).version)
            for name, (out, _) in zip(keys, lookup.take(), strict=True)
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
            table = self.table(name).settled
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
        lookup = GroupLookup(layout, push.version, descriptors, buffers, None, {})
        return GroupGradients(lookup, {0: gradient}, 1.0)

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
            return DeviceCapture(
                self.memory, {name: self.table(name).settled for name in tables}, parts, since
            )

    @override
    def sizes(self, tables: Sequence[str]) -> dict[str, int]:
        """Waits for the device once."""
        chosen = {name: self.table(name).settled.number for name in tables}  # first: rows may have to go
        counters = self.memory.learn_now().reshape(-1, fields.COUNTERS.value)
        return {name: int(counters[number, fields.ROWS.value]) for name, number in chosen.items()}
