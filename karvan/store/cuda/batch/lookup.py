"""The launches of a lookup: rows of keys, outputs, and the groups of positions that updates need.

All work is queued on the device; the host waits for nothing.
"""

from __future__ import annotations

import torch

from karvan.store.cuda import launch
from karvan.store.cuda.batch.admission import admit_keys
from karvan.store.cuda.batch.batch_ids import GroupLayout
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.find import find_rows
from karvan.store.cuda.kernels.initialise import finish_inserts
from karvan.store.cuda.kernels.pool import copy_vectors, describe_cells, pool_vectors
from karvan.store.cuda.kernels.runs import count_runs, describe_runs, write_runs
from karvan.store.cuda.rows.index import WIDTH

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
