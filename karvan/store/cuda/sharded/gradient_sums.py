"""The launches that sum the gradients of a request's outputs by key."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.store.cuda import launch
from karvan.store.cuda.batch.batch_ids import GroupLayout
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.batch.gradients import GroupGradients, GroupLookup, is_aligned
from karvan.store.cuda.batch.updates import put_scale
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.routing import average_runs
from karvan.store.cuda.kernels.sums import sum_pieces
from karvan.store.cuda.kernels.sums import write_sums as _write_sums

_HEAD = fields.HEAD.value


def write_sums(
    layout: GroupLayout,
    described: NDArray[np.int64],
    at: LookupBuffers,
    gradients: Mapping[int, Tensor],
    scale: float | Tensor,
) -> None:
    """Write the sums of the positions of each run, divided by `scale`, to where the arena has its row."""
    found = GroupLookup(layout, 0, described, at, None, {})
    descriptors = GroupGradients(found, gradients, scale).descriptors()
    head = np.zeros(_HEAD, np.int64)
    head[fields.PLAIN_END.value] = layout.plain_end
    put_scale(head, scale)
    memory, rows = at.memory, at.arena.layout
    sent = memory.uploads.send(np.concatenate([head, descriptors.reshape(-1)]))
    partial = torch.empty(at.most_pieces, rows.dim, dtype=torch.float32, device=memory.device)
    reads = (at.order, sent[_HEAD:], at.feature_of, at.out_rows, at.factors)
    shape = {
        "DIM": rows.dim,
        "COLUMNS": rows.columns,
        "MAPPED": at.mapped,
        "ALIGNED": is_aligned(descriptors),
    }
    sum_pieces[(memory.programs,)](
        at.work,
        *reads,
        at.piece_starts,
        at.piece_ends,
        partial,
        sent,
        memory.programs,
        **shape,
        **launch.update_tile(rows.columns),
    )
    for long in (True, False):
        _write_sums[(memory.programs,)](
            at.work,
            *reads,
            at.starts,
            at.run_rows,
            at.run_pieces,
            at.long_runs,
            partial,
            at.arena.chunks,
            sent,
            memory.programs,
            SHIFT=at.arena.shift,
            STRIDE=rows.stride,
            LONG=long,
            **shape,
            **launch.update_tile(rows.columns, long),
        )


def average(group: GroupGradients) -> None:
    """Divide the gradients of each key by the number of ranks that have sent one."""
    at = group.lookup.buffers
    if not group.lookup.layout.positions:
        return
    memory, layout = at.memory, at.arena.layout
    rows, warps = launch.tile(layout.columns)
    average_runs[(memory.programs,)](
        at.work,
        at.order,
        at.starts,
        at.run_rows,
        memory.uploads.send(group.descriptors()),
        at.feature_of,
        at.rows if group.present is None else group.present,
        memory.programs,
        DIM=layout.dim,
        COLUMNS=layout.columns,
        GROUP=rows,
        PARTIAL=group.present is not None,
        num_warps=warps,
    )
