"""The launches of a lookup: rows of keys, outputs, and the groups of positions that updates need.

All work is queued on the device; the host waits for nothing.
"""

from __future__ import annotations

import torch

from karvan.store.cuda import launch
from karvan.store.cuda.batch_ids import GroupLayout, LookupBuffers
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.admission import (
    MIN_COUNT,
    PROBABILITY,
    PROBABILITY_EACH,
    count_nominees,
    decide_nominees,
    insert_admitted,
    nominate_keys,
)
from karvan.store.cuda.kernels.find import find_rows
from karvan.store.cuda.kernels.initialise import finish_inserts
from karvan.store.cuda.kernels.pool import copy_vectors, describe_cells, pool_vectors
from karvan.store.cuda.kernels.runs import count_runs, describe_runs, write_runs
from karvan.store.cuda.table_memory import WIDTH, DeviceTable

# Admission on the device: the launches that decide on a batch's unknown keys.


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


_BLOCK = fields.BLOCK.value


def find(at: LookupBuffers, *, grows: bool) -> None:
    """Find the rows of all keys and, if training, claim rows for unknown ones."""
    memory, arena, shape = at.memory, at.arena, at.shape
    at.work.zero_()
    if at.mapped:
        at.out_rows.fill_(-1)
        others = shape.features - shape.plain_features
        describe_cells[(shape.samples,)](
            at.others,
            others,
            memory.arena_counters(arena),
            at.out_rows,
            at.factors,
            FEATURES=launch.power(others),
        )
    find_rows[(shape.positions,)](
        at.features,
        shape.features,
        at.tables,
        memory.table_counters,
        memory.arena_counters(arena),
        arena.chunks,
        at.work,
        at.rows,
        at.feature_of,
        at.out_rows,
        at.fresh,
        at.fresh_tables,
        at.pending,
        at.places,
        at.pending if at.missing is None else at.missing,
        memory.spare.data_ptr(),
        at.head,
        FEATURES=launch.power(shape.features),
        SHIFT=arena.shift,
        STRIDE=arena.layout.stride,
        WIDTH=WIDTH,
        INSERTS=shape.training,
        MAPPED=at.mapped,
        GROWS=grows,
        num_warps=4,
    )


def insert(at: LookupBuffers) -> None:
    """Fill the rows of unknown keys."""
    memory, arena, layout = at.memory, at.arena, at.arena.layout
    finish_inserts[(memory.programs,)](
        at.tables,
        memory.inits,
        memory.states(arena),
        memory.arena_counters(arena),
        arena.chunks,
        at.work,
        at.rows,
        at.fresh,
        at.fresh_tables,
        at.pending,
        at.places,
        memory.programs,
        DIM=layout.dim,
        STATE=layout.state,
        COLUMNS=layout.columns,
        STATES=layout.states,
        GROUP=max(1, min(16, 512 // layout.columns)),
        SHIFT=arena.shift,
        STRIDE=layout.stride,
        VECTOR=layout.vector,
        TYPE=layout.type,
        LEVEL=at.shape.init_level,
        num_warps=4,
        enable_fp_fusion=False,
    )


def fill_outputs(at: LookupBuffers) -> None:
    """Copy or pool vectors into the outputs."""
    arena, layout, shape = at.arena, at.arena.layout, at.shape
    constants = {
        "DIM": layout.dim,
        "COLUMNS": layout.columns,
        "SHIFT": arena.shift,
        "STRIDE": layout.stride,
        "TYPE": layout.type,
    }
    if shape.plain:
        group, warps = launch.copy_tile(layout.columns)
        programs = min(shape.plain * _BLOCK // group, at.memory.programs)
        copy_vectors[(programs,)](
            at.features,
            at.feature_of,
            at.head,
            arena.chunks,
            at.rows,
            programs,
            GROUP=group,
            num_warps=warps,
            **constants,
        )
    if shape.outs:
        others = shape.features - shape.plain_features
        group, warps = launch.tile(layout.columns)
        pool_vectors[(shape.outs * _BLOCK // group,)](
            at.others,
            others,
            arena.chunks,
            at.rows,
            FEATURES=launch.power(others),
            GROUP=group,
            num_warps=warps,
            **constants,
        )


def group_runs(at: LookupBuffers, *, uses: bool) -> None:
    """Sort the positions by row, and describe the runs of equal rows; uses: count those of the rows."""
    size, arena = at.shape.positions * _BLOCK, at.arena
    sorted_rows, at.order = torch.sort(at.rows, stable=True)
    count_runs[(at.spans,)](sorted_rows, size, at.span_runs, num_warps=4)
    write_runs[(at.spans,)](
        sorted_rows,
        size,
        at.span_runs,
        at.work,
        at.starts,
        at.run_rows,
        SPANS=launch.power(at.spans),
        num_warps=4,
    )
    describe_runs[(at.memory.programs,)](
        at.work,
        at.starts,
        at.run_rows,
        at.run_pieces,
        at.long_runs,
        at.piece_starts,
        at.piece_ends,
        arena.chunks,
        at.head,
        at.order,
        at.features,
        at.feature_of,
        at.tables,
        at.order if at.uses is None else at.uses,
        at.memory.programs,
        SHIFT=arena.shift,
        STRIDE=arena.layout.stride,
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
