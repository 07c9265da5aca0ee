"""Outputs of a batch: vectors of rows, copied or pooled by sample, straight from the rows' memory.

Also what the backward needs to know of a position: its output row, and the factor of its gradient.
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    BASE,
    BLOCK,
    CELLS,
    COMBINER,
    FAULTS,
    FEATURE_FIELDS,
    LENGTH,
    MODE,
    OFFSETS,
    OUT,
    OUT_BASE,
    OUT_ROWS,
    PLAIN_END,
    SAMPLE_BASE,
    SAMPLES,
    STACK,
    WEIGHTS,
    floats,
    read_vector,
    row_address,
)
from karvan.store.cuda.kernels.find import feature_at

POOLED = tl.constexpr(0)
PADDED = tl.constexpr(2)
MEAN = tl.constexpr(1)
SQRTN = tl.constexpr(2)
MEAN_BY_COUNT = tl.constexpr(3)


@triton.jit
def copy_vectors(
    features,
    feature_of,
    head,
    chunks,
    rows,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Outputs of features whose cells are their output rows, each of one key without a weight.

    A limited number of programs leaves room for kernels beside this one.
    """
    end = tl.load(head + PLAIN_END).to(tl.int32)
    column = tl.arange(0, COLUMNS)[None, :]
    for start in range(tl.program_id(0) * GROUP, end, tl.num_programs(0) * GROUP):
        feature = tl.load(feature_of + start // BLOCK)
        of_feature = features + feature * FEATURE_FIELDS
        position = start + tl.arange(0, GROUP)
        number = position - tl.load(of_feature + BASE)
        valid = number < tl.load(of_feature + CELLS)
        row = tl.load(rows + position)
        mask = valid[:, None] & (column < DIM)
        address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
        vector = read_vector(address, column, mask, TYPE, AGAIN=True)
        out = tl.load(of_feature + OUT) + number[:, None] * (4 * DIM)
        pointer = floats(out, column, 16 if DIM % 4 == 0 else 4)
        tl.store(pointer, vector, mask=mask, eviction_policy="evict_first")


@triton.jit
def cell_range(of_feature, sample, valid):
    """The first cell of samples, and how many they have; never beyond the feature's cells."""
    offsets = tl.load(of_feature + OFFSETS)
    cells = tl.load(of_feature + CELLS)
    first = sample.to(tl.int64)
    count = tl.full(first.shape, 1, tl.int64)
    if offsets != 0:
        pointer = offsets.to(tl.pointer_type(tl.int64))
        first = tl.load(pointer + sample, mask=valid, other=0)
        count = tl.load(pointer + sample + 1, mask=valid, other=0) - first
    first = tl.minimum(tl.maximum(first, 0), cells)
    count = tl.minimum(tl.maximum(count, 0), cells - first)
    return first, tl.where(valid, count, 0)


@triton.jit
def sample_scale(of_feature, first, count):
    """What a pooled sample's sum is multiplied by."""
    combiner = tl.load(of_feature + COMBINER)
    weights = tl.load(of_feature + WEIGHTS)
    size = count.to(tl.float32)
    if (weights != 0) & (combiner != MEAN_BY_COUNT):
        pointer = weights.to(tl.pointer_type(tl.float32))
        size = tl.zeros_like(size)
        for j in range(0, tl.max(count, axis=0)):
            weight = tl.load(pointer + first + j, mask=j < count, other=0.0)
            size += tl.where(combiner == SQRTN, weight * weight, weight)
    size = tl.where(combiner == SQRTN, tl.sqrt_rn(size), size)
    full_weight = tl.full(size.shape, 1.0, tl.float32)
    scale = tl.where(size == 0.0, 0.0, tl.div_rn(full_weight, tl.where(size == 0.0, 1.0, size)))
    return tl.where(combiner == 0, 1.0, scale)


@triton.jit
def describe_cells(features, feature_count, arena, out_rows, factors, FEATURES: tl.constexpr):
    """The output row and the factor of each position, -1 for those that a padded output leaves out.

    A program has a block of one feature's samples. Positions that no sample
    has keep what was there before, so `out_rows` begins as -1.
    """
    start = tl.program_id(0) * BLOCK
    feature = feature_at(features, feature_count, start, SAMPLE_BASE, FEATURES)
    of_feature = features + feature * FEATURE_FIELDS
    sample = start - tl.load(of_feature + SAMPLE_BASE) + tl.arange(0, BLOCK)
    samples = tl.load(of_feature + SAMPLES)
    valid = sample < samples
    mode = tl.load(of_feature + MODE)
    length = tl.load(of_feature + LENGTH)
    stack = tl.load(of_feature + STACK)
    cells = tl.load(of_feature + CELLS)
    weights = tl.load(of_feature + WEIGHTS)
    offsets = tl.load(of_feature + OFFSETS)
    first, count = cell_range(of_feature, sample, valid)
    if offsets != 0:
        pointer = offsets.to(tl.pointer_type(tl.int64))
        begin = tl.load(pointer + sample, mask=valid, other=0)
        end = tl.load(pointer + sample + 1, mask=valid, other=0)
        wrong = valid & ((end < begin) | (begin < 0) | (end > cells))
        wrong = (
            wrong
            | (valid & (sample == 0) & (begin != 0))
            | (valid & (sample == samples - 1) & (end != cells))
        )
        faults = tl.sum(wrong.to(tl.int64), axis=0)
        if faults > 0:
            tl.atomic_add(arena + FAULTS, faults)
    scale = tl.full(first.shape, 1.0, tl.float32)
    if mode == POOLED:
        scale = sample_scale(of_feature, first, count)
    base_position = tl.load(of_feature + BASE)
    for j in range(0, tl.max(count, axis=0)):
        inside = j < count
        cell = first + j
        factor = scale
        if weights != 0:
            factor = scale * tl.load(weights.to(tl.pointer_type(tl.float32)) + cell, mask=inside, other=0.0)
        row = sample.to(tl.int64)
        if mode == PADDED:
            row = tl.where(j < length, sample * length + j, -1)
        elif mode != POOLED:
            row = cell
        for s in range(0, stack):
            position = base_position + cell * stack + s
            tl.store(out_rows + position, row.to(tl.int32), mask=inside)
            tl.store(factors + position, factor, mask=inside)


@triton.jit
def pool_vectors(
    features,
    feature_count,
    chunks,
    rows,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Outputs of any feature: pooled, padded, or one for each cell, with weights and stacks of keys."""
    start = tl.program_id(0) * GROUP
    feature = feature_at(features, feature_count, start, OUT_BASE, FEATURES)
    of_feature = features + feature * FEATURE_FIELDS
    out_row = start - tl.load(of_feature + OUT_BASE) + tl.arange(0, GROUP)
    valid = out_row < tl.load(of_feature + OUT_ROWS)
    mode = tl.load(of_feature + MODE)
    stack = tl.load(of_feature + STACK)
    cells = tl.load(of_feature + CELLS)
    weights = tl.load(of_feature + WEIGHTS)
    length = tl.maximum(tl.load(of_feature + LENGTH), 1)
    base_position = tl.load(of_feature + BASE)
    sample = tl.where(mode == PADDED, out_row // length, out_row)
    first, count = cell_range(of_feature, sample, valid & (sample < tl.load(of_feature + SAMPLES)))
    scale = tl.full(first.shape, 1.0, tl.float32)
    if mode == POOLED:
        scale = sample_scale(of_feature, first, count)
    elif mode == PADDED:
        column_of_sample = out_row % length
        count = (column_of_sample < count).to(tl.int64)
        first = first + column_of_sample
    else:
        first = out_row
        count = (valid & (out_row < cells)).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([GROUP, COLUMNS], tl.float32)
    for j in range(0, tl.max(count, axis=0)):
        inside = j < count
        cell = first + j
        vector = tl.zeros([GROUP, COLUMNS], tl.float32)
        for s in range(0, stack):
            row = tl.load(rows + base_position + cell * stack + s, mask=inside, other=0)
            mask = inside[:, None] & (column < DIM)
            vector += read_vector(row_address(chunks, row, SHIFT, STRIDE)[:, None], column, mask, TYPE)
        if weights != 0:
            weight = tl.load(weights.to(tl.pointer_type(tl.float32)) + cell, mask=inside, other=0.0)
            vector = vector * weight[:, None]
        total += vector
    if mode == POOLED:
        total = total * scale[:, None]
    out = tl.load(of_feature + OUT) + out_row[:, None] * (4 * DIM)
    mask = valid[:, None] & (column < DIM)
    tl.store(floats(out, column, 16 if DIM % 4 == 0 else 4), total, mask=mask)
