"""The launches of a lookup: rows of keys, outputs, and the groups of positions that updates need.

All work is queued on the device; the host waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.batch_ids import GroupLayout, LookupBuffers
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.find import (
    MIN_COUNT,
    PROBABILITY,
    PROBABILITY_EACH,
    WIDTH,
    count_nominees,
    decide_nominees,
    find_rows,
    insert_admitted,
    nominate_keys,
)
from karvan.store.cuda.kernels.initialise import finish_inserts
from karvan.store.cuda.kernels.pool import copy_vectors, describe_cells, pool_vectors
from karvan.store.cuda.kernels.runs import count_runs, describe_runs, write_runs
from karvan.store.cuda.table_memory import DeviceTable

# Admission on the device: the launches that decide on a batch's unknown keys.


_KINDS = {
    "read_only": 0,
    "probability": PROBABILITY.value,
    "probability_each": PROBABILITY_EACH.value,
    "min_count": MIN_COUNT.value,
}


def admit_keys(at: LookupBuffers, table: DeviceTable) -> None:
    """Decide on the keys of a table that have no row, and insert those that get one."""
    kind, value, _ = table.spec.admit
    memory, arena, missing, number = at.memory, at.arena, at.missing, table.number
    assert missing is not None
    positions = missing.numel()
    slots = launch.power(2 * positions)
    entries = torch.zeros(2 * (slots + WIDTH.value), dtype=torch.int64, device=memory.device)
    places = torch.empty(positions, dtype=torch.int64, device=memory.device)
    threshold = torch.full((1,), value, dtype=torch.float64, device=memory.device)
    grid, slot_grid = launch.blocks(positions), launch.blocks(slots + 1)
    index, spare = entries.data_ptr(), memory.spare.data_ptr()
    positions_of = (at.features, at.feature_of, missing)
    uses = places if at.uses is None else at.uses
    candidates = (uses, number, index, slots - 1, spare, places)
    nominate_keys[grid](*positions_of, at.work, *candidates, GIVEN=at.uses is not None)
    counters = memory.empty if table.filter is None else table.filter
    blocks = counters.numel() // 64
    if table.filter is not None:
        count_nominees[slot_grid](index, slots, counters, blocks)
    nominees = (index, slots, counters, blocks, at.tables, number, memory.table_counters, at.head, threshold)
    decide_nominees[slot_grid](*nominees, int(value) if kind == "min_count" else 0, KIND=_KINDS[kind])
    rows = (at.tables, number, memory.table_counters, memory.arena_counters(arena), arena.chunks, at.work)
    fresh = (at.rows, at.fresh, at.fresh_tables, at.pending, at.places)
    constants = arena.constants("SHIFT", "STRIDE")
    insert_admitted[grid](*positions_of, places, *rows, *fresh, spare, **constants)


_BLOCK = fields.BLOCK.value


def describe(at: LookupBuffers, counters: Tensor) -> None:
    """Describe the cells of features that are not plain; faults count among the counters of an arena."""
    if at.mapped:
        at.out_rows.fill_(-1)
        others = at.shape.features - at.shape.plain_features
        describe_cells[(at.shape.samples,)](
            at.others, others, counters, at.out_rows, at.factors, FEATURES=launch.power(others)
        )


def find(at: LookupBuffers, *, grows: bool) -> None:
    """Find the rows of all keys and, if training, claim rows for unknown ones."""
    memory, arena, shape = at.memory, at.arena, at.shape
    at.work.zero_()
    describe(at, memory.arena_counters(arena))
    reads = (at.features, shape.features, at.tables, memory.table_counters, memory.arena_counters(arena))
    rows = (arena.chunks, at.work, at.rows, at.feature_of, at.out_rows)
    missing = at.pending if at.missing is None else at.missing
    fresh = (at.fresh, at.fresh_tables, at.pending, at.places, missing)
    find_rows[(shape.positions,)](
        *(*reads, *rows, *fresh, memory.spare.data_ptr(), at.head),
        FEATURES=launch.power(shape.features),
        **arena.constants("SHIFT", "STRIDE"),
        **{"INSERTS": shape.training, "MAPPED": at.mapped, "GROWS": grows},
        num_warps=4,
    )


def insert(at: LookupBuffers) -> None:
    """Fill the rows of unknown keys."""
    memory, arena = at.memory, at.arena
    tables = (at.tables, memory.inits, memory.states(arena), memory.arena_counters(arena), arena.chunks)
    finish_inserts[(memory.programs,)](
        *(*tables, at.work, at.rows, at.fresh, at.fresh_tables, at.pending, at.places),
        **arena.constants("DIM", "STATE", "COLUMNS", "STATES", "SHIFT", "STRIDE", "VECTOR", "TYPE"),
        GROUP=max(1, min(16, 512 // arena.layout.columns)),
        LEVEL=at.shape.init_level,
        num_warps=4,
        enable_fp_fusion=False,
    )


def fill_outputs(at: LookupBuffers) -> None:
    """Copy or pool vectors into the outputs."""
    arena, columns, shape = at.arena, at.arena.layout.columns, at.shape
    constants = arena.constants("DIM", "COLUMNS", "SHIFT", "STRIDE", "TYPE")
    if shape.plain:
        tile = launch.tile(columns, 512)  # small blocks: those beside another kernel are not waited for
        programs = min(shape.plain * _BLOCK // tile["GROUP"], at.memory.programs)
        copy_vectors[(programs,)](
            at.features, at.feature_of, at.head, arena.chunks, at.rows, **tile, **constants
        )
    if shape.outs:
        tile, others = launch.tile(columns), shape.features - shape.plain_features
        pool_vectors[(shape.outs * _BLOCK // tile["GROUP"],)](
            at.others, others, arena.chunks, at.rows, FEATURES=launch.power(others), **tile, **constants
        )


def group_runs(at: LookupBuffers, *, uses: bool) -> None:
    """Sort the positions by row, and describe the runs of equal rows; uses: count those of the rows."""
    size, arena, runs = at.shape.positions * _BLOCK, at.arena, (at.work, at.starts, at.run_rows)
    sorted_rows, at.order = torch.sort(at.rows, stable=True)
    count_runs[(at.spans,)](sorted_rows, size, at.span_runs, num_warps=4)
    spans = launch.power(at.spans)
    write_runs[(at.spans,)](sorted_rows, size, at.span_runs, *runs, SPANS=spans, num_warps=4)
    pieces = (at.run_pieces, at.long_runs, at.piece_starts, at.piece_ends)
    positions = (at.order, at.features, at.feature_of, at.tables, at.order if at.uses is None else at.uses)
    describe_runs[(at.memory.programs,)](
        *(*runs, *pieces, arena.chunks, at.head, *positions),
        **arena.constants("SHIFT", "STRIDE"),
        USES=uses,
        GIVEN=at.uses is not None,
        num_warps=4,
    )


def run(at: LookupBuffers, layout: GroupLayout | None = None) -> None:
    """All of a lookup. layout: needed where tables do not admit every key, or grow."""
    memory = at.memory
    find(at, grows=layout is not None and any(table.index.grows for table in layout.tables))
    if not at.shape.training:
        fill_outputs(at)
        return
    if layout is not None and at.missing is not None:
        for table in layout.tables:
            if not table.admits_all:
                admit_keys(at, table)
    insert(at)
    with launch.beside(memory.streams.side, at.shared):
        group_runs(at, uses=True)
    fill_outputs(at)
    launch.join(memory.streams.side)
    if memory.streams.side is not None and not torch.cuda.is_current_stream_capturing():
        at.order.record_stream(torch.cuda.current_stream(memory.device))
