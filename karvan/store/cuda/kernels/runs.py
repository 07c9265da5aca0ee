"""Positions grouped by row, as runs of equal rows in the sorted batch, and their gradients summed by row.

A run's positions are in their order in the batch, so sums over them have one order, whatever the numbers of
the rows. Long runs are cut into pieces of PIECE positions, which different programs sum.
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    BASE,
    BIRTH,
    BLOCK,
    CHANGE,
    COUNT,
    COUNTERS,
    DROPPED,
    FEATURE_FIELDS,
    GRADIENT,
    GRADIENT_STRIDE,
    INVERSE_SCALE,
    LAST,
    LONG_RUNS,
    PIECES,
    PLAIN_END,
    SCALE,
    SLOT,
    STEP,
    TABLE,
    TABLE_FIELDS,
    UNIQUE,
    VERSION,
    field_pointer,
    floats,
    row_address,
)

PIECE = tl.constexpr(64)
SPAN = tl.constexpr(1024)  # sorted positions of one program


@triton.jit
def _begins(sorted_rows, size, at):
    row = tl.load(sorted_rows + at, mask=at < size, other=0)
    before = tl.load(sorted_rows + at - 1, mask=(at > 0) & (at < size), other=-1)
    return row, (at < size) & (row > 0) & (row != before)


@triton.jit
def count_runs(sorted_rows, size, counts):
    """How many runs begin in each span."""
    at = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    _, begins = _begins(sorted_rows, size, at)
    tl.store(counts + tl.program_id(0), tl.sum(begins.to(tl.int32), axis=0))


@triton.jit
def write_runs(sorted_rows, size, counts, work, starts, run_rows, SPANS: tl.constexpr):
    """The start and the row of each run, then the end of the last; run 0 is the first of a row above 0."""
    program = tl.program_id(0)
    span = tl.arange(0, SPANS)
    before = tl.sum(tl.load(counts + span, mask=span < program, other=0), axis=0)
    at = program * SPAN + tl.arange(0, SPAN)
    row, begins = _begins(sorted_rows, size, at)
    number = before + tl.cumsum(begins.to(tl.int32), axis=0) - 1
    tl.store(starts + number, at, mask=begins)
    tl.store(run_rows + number, row, mask=begins)
    if program == tl.num_programs(0) - 1:
        total = before + tl.sum(begins.to(tl.int32), axis=0)
        tl.store(work + UNIQUE, total)
        tl.store(starts + total, size)


@triton.jit
def sum_uses(uses, order, first, size):
    """The sum of the uses of each run's positions, order[first : first + size]."""
    times = tl.zeros_like(size)
    for j in range(0, tl.max(size, axis=0)):
        at = tl.load(order + first + j, mask=j < size, other=0)
        times += tl.load(uses + at, mask=j < size, other=0)
    return times


@triton.jit
def describe_runs(
    work,
    starts,
    run_rows,
    run_pieces,
    long_runs,
    piece_starts,
    piece_ends,
    chunks,
    head,
    order,
    features,
    feature_of,
    tables,
    uses,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    USES: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Cut long runs into pieces; with USES, count the uses of rows and note the step and the change.

    GIVEN: `uses` has those of each position; otherwise each is one.
    """
    count = tl.load(work + UNIQUE)
    step = tl.load(head + STEP).to(tl.int32)
    for start in range(tl.program_id(0) * 128, count, tl.num_programs(0) * 128):
        number = start + tl.arange(0, 128)
        valid = number < count
        row = tl.load(run_rows + number, mask=valid, other=0)
        first = tl.load(starts + number, mask=valid, other=0)
        end = tl.load(starts + number + 1, mask=valid, other=0)
        size = end - first
        if USES:
            position = tl.load(order + first, mask=valid, other=0)
            times = size
            if GIVEN:
                times = sum_uses(uses, order, first, size)
            so_far = field_pointer(chunks, row, COUNT, SHIFT, STRIDE)
            before = tl.load(so_far).to(tl.uint32, bitcast=True)
            after = before + times.to(tl.uint32, bitcast=True)
            after = tl.where(after < before, 0xFFFFFFFF, after)
            tl.store(so_far, after.to(tl.int32, bitcast=True), mask=valid)
            feature = tl.load(feature_of + position // BLOCK, mask=valid, other=0)
            table = tl.load(features + feature * FEATURE_FIELDS + TABLE, mask=valid, other=0)
            version = tl.load(tables + table * TABLE_FIELDS + VERSION).to(tl.int32)
            tl.store(field_pointer(chunks, row, LAST, SHIFT, STRIDE), step, mask=valid)
            tl.store(field_pointer(chunks, row, CHANGE, SHIFT, STRIDE), version, mask=valid)
        pieces = tl.where(valid & (size > PIECE), (size + PIECE - 1) // PIECE, 0)
        total = tl.sum(pieces, axis=0)
        if total > 0:
            base = tl.atomic_add(work + PIECES, total) + tl.cumsum(pieces, axis=0) - pieces
            tl.store(run_pieces + number, base, mask=pieces > 0)
            long = (pieces > 0).to(tl.int32)
            at = tl.atomic_add(work + LONG_RUNS, tl.sum(long, axis=0)) + tl.cumsum(long, axis=0) - 1
            tl.store(long_runs + at, number, mask=pieces > 0)
            for j in range(0, tl.max(pieces, axis=0)):
                mask = j < pieces
                at = first + j * PIECE
                tl.store(piece_starts + base + j, at, mask=mask)
                tl.store(piece_ends + base + j, tl.minimum(at + PIECE, end), mask=mask)


@triton.jit
def _runs_from(start, count, order, starts, run_rows, features, feature_of):
    """128 runs: their numbers, which of them there are, their rows, and the feature of the first position."""
    number = start + tl.arange(0, 128)
    valid = number < count
    row = tl.load(run_rows + number, mask=valid, other=0)
    first = tl.load(starts + number, mask=valid, other=0)
    position = tl.load(order + first, mask=valid, other=0)
    of_feature = features + tl.load(feature_of + position // BLOCK, mask=valid, other=0) * FEATURE_FIELDS
    return number, valid, row, of_feature


@triton.jit
def drop_runs(
    work,
    order,
    starts,
    run_rows,
    features,
    feature_of,
    versions,
    counters,
    chunks,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Forget the rows of runs that are gone since their lookup, and count them; versions: of slots, then."""
    count = tl.load(work + UNIQUE)
    for start in range(tl.program_id(0) * 128, count, tl.num_programs(0) * 128):
        number, valid, row, of_feature = _runs_from(
            start, count, order, starts, run_rows, features, feature_of
        )
        version = tl.load(versions + tl.load(of_feature + SLOT, mask=valid, other=0))
        birth = tl.load(field_pointer(chunks, row, BIRTH, SHIFT, STRIDE))
        deleted = valid & (row > 0) & ((birth < 0) | (birth > version))
        if tl.max(deleted.to(tl.int32), axis=0) > 0:
            tl.store(run_rows + number, 0, mask=deleted)
            table = tl.load(of_feature + TABLE, mask=valid, other=0)
            unit = tl.full(table.shape, 1, tl.int64)
            tl.atomic_add(counters + table * COUNTERS + DROPPED, unit, mask=deleted)


@triton.jit
def note_changes(
    work,
    order,
    starts,
    run_rows,
    features,
    feature_of,
    versions,
    chunks,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Note that the rows of all runs have changed; versions: of slots, now."""
    count = tl.load(work + UNIQUE)
    for start in range(tl.program_id(0) * 128, count, tl.num_programs(0) * 128):
        _, valid, row, of_feature = _runs_from(start, count, order, starts, run_rows, features, feature_of)
        version = tl.load(versions + tl.load(of_feature + SLOT, mask=valid, other=0))
        change = field_pointer(chunks, row, CHANGE, SHIFT, STRIDE)
        tl.store(change, version.to(tl.int32), mask=valid & (row > 0))


@triton.jit
def drop_positions(
    rows, size, features, feature_of, versions, chunks, SHIFT: tl.constexpr, STRIDE: tl.constexpr
):
    """Forget the rows of positions that are gone since their lookup."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = position < size
    row = tl.load(rows + position, mask=valid, other=0)
    feature = tl.load(feature_of + tl.program_id(0))
    version = tl.load(versions + tl.load(features + feature * FEATURE_FIELDS + SLOT))
    birth = tl.load(field_pointer(chunks, row, BIRTH, SHIFT, STRIDE))
    tl.store(rows + position, 0, mask=valid & (row > 0) & ((birth < 0) | (birth > version)))


@triton.jit
def map_plain(features, feature_of, out_rows, factors):
    """The output row and the factor of the positions of plain features, as `describe_cells` writes them."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    feature = tl.load(feature_of + tl.program_id(0))
    number = position - tl.load(features + feature * FEATURE_FIELDS + BASE)
    tl.store(out_rows + position, number.to(tl.int32))
    tl.store(factors + position, tl.full(position.shape, 1.0, tl.float32))


# Gradients of positions summed by row: device functions, and kernels that write sums to memory.


@triton.jit
def head_number(head, FIELD: tl.constexpr, NONE: tl.constexpr):
    """The float whose address a field of the head has; NONE if that is 0."""
    address = tl.load(head + FIELD)
    return tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=NONE)


@triton.jit
def sum_positions(
    reads,
    first,
    count,
    column,
    head,
    DIM: tl.constexpr,
    TOGETHER: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sums of the gradients of positions order[first : first + count] for each run, (runs, columns).

    reads: the order of positions, the features, those of positions, and their output rows and factors.
    """
    order, features, feature_of, out_rows, factors = reads
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
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    MAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The sum of each piece of a long run."""
    reads = (order, features, feature_of, out_rows, factors)
    count = tl.load(work + PIECES)
    column = tl.arange(0, COLUMNS)
    for start in range(tl.program_id(0) * GROUP, count, tl.num_programs(0) * GROUP):
        number = start + tl.arange(0, GROUP)
        valid = number < count
        first = tl.load(piece_starts + number, mask=valid, other=0)
        size = tl.load(piece_ends + number, mask=valid, other=0) - first
        total = sum_positions(reads, first, size, column, head, DIM, TOGETHER, MAPPED, ALIGNED)
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
    reads = (order, features, feature_of, out_rows, factors)
    column = tl.arange(0, COLUMNS)
    for start in range(tl.program_id(0) * GROUP, count, tl.num_programs(0) * GROUP):
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
            total = sum_positions(reads, first, size, column, head, DIM, TOGETHER, MAPPED, ALIGNED)
        address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
        mask = valid[:, None] & (column < DIM)[None, :]
        tl.store(floats(address, column[None, :], 16), total, mask=mask)
