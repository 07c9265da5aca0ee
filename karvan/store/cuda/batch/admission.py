"""Admission on the device: the launches that decide on a batch's unknown keys."""

from __future__ import annotations

import torch

from karvan.store.cuda import launch
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.kernels.admission import (
    MIN_COUNT,
    PROBABILITY,
    PROBABILITY_EACH,
    count_nominees,
    decide_nominees,
    insert_admitted,
    nominate_keys,
)
from karvan.store.cuda.rows.index import WIDTH
from karvan.store.cuda.rows.tables import DeviceTable

_KINDS = {
    "read_only": 0,
    "probability": PROBABILITY.value,
    "probability_each": PROBABILITY_EACH.value,
    "min_count": MIN_COUNT.value,
}


def admit_keys(lookup: LookupBuffers, table: DeviceTable) -> None:
    """Decide on the keys of a table that have no row, and insert those that get one."""
    kind, value, _ = table.spec.admit
    memory, arena, missing = lookup.memory, lookup.arena, lookup.missing
    assert missing is not None
    positions = missing.numel()
    slots = launch.power(2 * positions)
    index = torch.zeros(2 * (slots + WIDTH), dtype=torch.int64, device=memory.device)
    places = torch.empty(positions, dtype=torch.int64, device=memory.device)
    uses = places if lookup.uses is None else lookup.uses
    threshold = torch.full((1,), value, dtype=torch.float64, device=memory.device)
    grid = launch.blocks(positions)
    slot_grid = launch.blocks(slots + 1)
    common = (lookup.features, lookup.feature_of, missing)
    nominate_keys[grid](
        *common,
        lookup.work,
        uses,
        table.number,
        index.data_ptr(),
        slots - 1,
        memory.spare.data_ptr(),
        places,
        WIDTH=WIDTH,
        GIVEN=lookup.uses is not None,
    )
    counters = table.filter if table.filter is not None else memory.empty
    blocks = counters.numel() // 64
    if table.filter is not None:
        count_nominees[slot_grid](index.data_ptr(), slots, counters, blocks)
    decide_nominees[slot_grid](
        index.data_ptr(),
        slots,
        counters,
        blocks,
        lookup.tables,
        table.number,
        memory.table_counters,
        lookup.head,
        threshold,
        int(value) if kind == "min_count" else 0,
        KIND=_KINDS[kind],
    )
    insert_admitted[grid](
        *common,
        places,
        lookup.tables,
        table.number,
        memory.table_counters,
        memory.arena_counters(arena),
        arena.chunks,
        lookup.work,
        lookup.rows,
        lookup.fresh,
        lookup.fresh_tables,
        lookup.pending,
        lookup.places,
        memory.spare.data_ptr(),
        SHIFT=arena.shift,
        STRIDE=arena.layout.stride,
        WIDTH=WIDTH,
    )
