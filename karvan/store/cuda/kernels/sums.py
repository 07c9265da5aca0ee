"""Gradients of positions summed by row: device functions, and kernels that write sums to memory."""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    BASE,
    BLOCK,
    FEATURE_FIELDS,
    GRADIENT,
    GRADIENT_STRIDE,
    INVERSE_SCALE,
    LONG_RUNS,
    PIECES,
    PLAIN_END,
    SCALE,
    UNIQUE,
)
from karvan.store.cuda.kernels.row_memory import floats, row_address
from karvan.store.cuda.kernels.runs import PIECE


@triton.jit
def head_number(head, FIELD: tl.constexpr, NONE: tl.constexpr):
    """The float whose address a field of the head has; NONE if that is 0."""
    address = tl.load(head + FIELD)
    return tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=NONE)


@triton.jit
def sum_positions(
    order,
    features,
    feature_of,
    out_rows,
    factors,
    first,
    count,
    column,
    head,
    DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sums of the gradients of positions order[first : first + count] for each run, (runs, columns)."""
    total = tl.zeros([first.shape[0], column.shape[0]], tl.float32)
    some = tl.arange(0, TOGETHER)[None, :]
    for j in range(0, tl.max(count, axis=0), TOGETHER):
        inside = (j + some) < count[:, None]
        position = tl.load(order + (first[:, None] + j + some), mask=inside, other=0)
        of_feature = features + tl.load(feature_of + position // BLOCK, mask=inside, other=0) * FEATURE_FIELDS
        gradient = tl.load(of_feature + GRADIENT)
        stride = tl.load(of_feature + GRADIENT_STRIDE)
        if MAPPED:
            plain = position < tl.load(head + PLAIN_END)
            out_row = tl.load(out_rows + position, mask=inside & ~plain, other=0).to(tl.int64)
            out_row = tl.where(plain, position - tl.load(of_feature + BASE), out_row)
        else:
            out_row = position - tl.load(of_feature + BASE)
        inside = inside & (gradient != 0)
        address = gradient + out_row * stride * 4
        values = tl.load(
            floats(address[:, :, None], column[None, None, :], 16 if ALIGNED else 4),
            mask=inside[:, :, None] & (column < DIM)[None, None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        if MAPPED:
            values = values * tl.load(factors + position, mask=inside & ~plain, other=1.0)[:, :, None]
        total += tl.sum(values, axis=1)
    inverse = tl.load(head + INVERSE_SCALE).to(tl.float64, bitcast=True).to(tl.float32)
    return total * tl.div_rn(inverse, head_number(head, SCALE, 1.0))


@triton.jit
def sum_pieces(
    work,
    order,
    features,
    feature_of,
    out_rows,
    factors,
    piece_starts,
    piece_ends,
    partial,
    head,
    programs,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The sum of each piece of a long run."""
    count = tl.load(work + PIECES)
    column = tl.arange(0, COLUMNS)
    for start in range(tl.program_id(0) * GROUP, count, programs * GROUP):
        number = start + tl.arange(0, GROUP)
        valid = number < count
        first = tl.load(piece_starts + number, mask=valid, other=0)
        size = tl.load(piece_ends + number, mask=valid, other=0) - first
        total = sum_positions(
            order,
            features,
            feature_of,
            out_rows,
            factors,
            first,
            size,
            column,
            head,
            DIM,
            TOGETHER,
            MAPPED,
            ALIGNED,
        )
        tl.store(
            partial + number[:, None].to(tl.int64) * DIM + column[None, :],
            total,
            mask=valid[:, None] & (column < DIM)[None, :],
        )


@triton.jit
def sum_of_pieces(partial, run_pieces, number, size, column, DIM: tl.constexpr, TOGETHER: tl.constexpr):
    """Sums of the pieces of long runs of `size` positions, (runs, columns); a run of size 0 has none."""
    total = tl.zeros([number.shape[0], column.shape[0]], tl.float32)
    pieces = (size + PIECE - 1) // PIECE
    base = tl.load(run_pieces + number, mask=pieces > 0, other=0).to(tl.int64)
    some = tl.arange(0, TOGETHER)[None, :]
    for j in range(0, tl.max(pieces, axis=0), TOGETHER):
        takes = (j + some) < pieces[:, None]
        at = (base[:, None] + j + some) * DIM
        values = tl.load(
            partial + at[:, :, None] + column[None, None, :],
            mask=takes[:, :, None] & (column < DIM)[None, None, :],
            other=0.0,
        )
        total += tl.sum(values, axis=1)
    return total


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
    """Write the sum of each short run's positions, or of each LONG run's pieces, to its row's address.

    Ranks send these sums to the ranks that own the rows.
    """
    count = tl.load(work + (LONG_RUNS if LONG else UNIQUE))
    column = tl.arange(0, COLUMNS)
    for start in range(tl.program_id(0) * GROUP, count, programs * GROUP):
        number = start + tl.arange(0, GROUP)
        valid = number < count
        if LONG:
            number = tl.load(long_runs + number, mask=valid, other=0)
        row = tl.load(run_rows + number, mask=valid, other=0)
        first = tl.load(starts + number, mask=valid, other=0)
        size = tl.load(starts + number + 1, mask=valid, other=0) - first
        if not LONG:
            valid = valid & (size <= PIECE)
        size = tl.where(valid, size, 0)
        if LONG:
            total = sum_of_pieces(partial, run_pieces, number, size, column, DIM, TOGETHER)
        else:
            total = sum_positions(
                order,
                features,
                feature_of,
                out_rows,
                factors,
                first,
                size,
                column,
                head,
                DIM,
                TOGETHER,
                MAPPED,
                ALIGNED,
            )
        address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
        mask = valid[:, None] & (column < DIM)[None, :]
        tl.store(floats(address, column[None, :], 16), total, mask=mask)
