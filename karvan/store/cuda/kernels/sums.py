"""Gradients of positions summed by row, and written to memory, for the ranks that own the rows."""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import LONG_RUNS, UNIQUE
from karvan.store.cuda.kernels.row_memory import floats, row_address
from karvan.store.cuda.kernels.runs import PIECE
from karvan.store.cuda.kernels.update import sum_positions


@triton.jit
def write_sums(
    work,
    order,
    features,
    feature_of,
    out_rows,
    factors,
    starts,
    run_rows,
    run_pieces,
    long_runs,
    partial,
    chunks,
    head,
    programs,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    LONG: tl.constexpr,
):
    """Write the sum of each short run's positions, or of each LONG run's pieces, to its row's address."""
    count = tl.load(work + (LONG_RUNS if LONG else UNIQUE))
    column = tl.arange(0, COLUMNS)
    for start in range(tl.program_id(0) * GROUP, count, programs * GROUP):
        number = start + tl.arange(0, GROUP)
        there = number < count
        if LONG:
            number = tl.load(long_runs + number, mask=there, other=0)
        row = tl.load(run_rows + number, mask=there, other=0)
        first = tl.load(starts + number, mask=there, other=0)
        size = tl.load(starts + number + 1, mask=there, other=0) - first
        if LONG:
            total = tl.zeros([GROUP, COLUMNS], tl.float32)
            base = tl.load(run_pieces + number, mask=there, other=0).to(tl.int64)
            pieces = tl.where(there, (size + PIECE - 1) // PIECE, 0)
            for j in range(0, tl.max(pieces, axis=0)):
                mask = (j < pieces)[:, None] & (column < DIM)[None, :]
                total += tl.load(partial + (base + j)[:, None] * DIM + column[None, :], mask=mask, other=0.0)
        else:
            there = there & (size <= PIECE)
            total = sum_positions(
                order,
                features,
                feature_of,
                out_rows,
                factors,
                first,
                tl.where(there, size, 0),
                column,
                head,
                DIM,
                TOGETHER,
                MAPPED,
                ALIGNED,
            )
        address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
        mask = there[:, None] & (column < DIM)[None, :]
        tl.store(floats(address, column[None, :], 16), total, mask=mask)
