"""A batch's keys on their way to the ranks that own them.

A part is a rank and a table, `rank * slots + slot`; parts follow one another in messages, and the keys of a
part in the order of their hashes. Vectors and gradients of keys are numbered in units of 16 bytes from the
beginning of their buffer, as rows: those of part p begin with key number k at FIRST[p] + k * UNITS[p].
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    BASE,
    BLOCK,
    CELLS,
    FEATURE_FIELDS,
    GRADIENT,
    GRADIENT_STRIDE,
    PLAIN_END,
    SLOT,
    STACK,
    UNIQUE,
    VALUES,
    floats,
)
from karvan.store.cuda.kernels.find import feature_at, mix, unmix
from karvan.store.cuda.kernels.runs import sum_uses

# What the host sends of a part.
FIRST = tl.constexpr(0)  # where its vectors would begin if its first key were number 0
UNITS = tl.constexpr(1)  # of a vector
WORD = tl.constexpr(2)  # where its first key would be in the message if it were number 0
USE = tl.constexpr(3)  # the same for its uses, in units of 4 bytes
PART_FIELDS = tl.constexpr(4)


# A number 1 would become a constant, which has no type to convert.
@triton.jit(do_not_specialize=["ranks", "slots"])
def route_keys(
    features,
    feature_count,
    head,
    out_rows,
    feature_of,
    hashes,
    parts,
    ranks,
    slots,
    FEATURES: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """The hash and the part of each position; positions that are not looked up have the part behind the last.

    The owner of a hash is that of csrc/batch/key_routing.h.
    """
    start = tl.program_id(0) * BLOCK
    feature = feature_at(features, feature_count, start, BASE, FEATURES)
    tl.store(feature_of + tl.program_id(0), feature)
    of_feature = features + feature * FEATURE_FIELDS
    position = start + tl.arange(0, BLOCK)
    number = position - tl.load(of_feature + BASE)
    wanted = number < tl.load(of_feature + CELLS) * tl.load(of_feature + STACK)
    if MAPPED:
        wanted = wanted & ((position < tl.load(head + PLAIN_END)) | (tl.load(out_rows + position) >= 0))
    values = tl.load(of_feature + VALUES).to(tl.pointer_type(tl.int64))
    hashed = mix(tl.load(values + number, mask=wanted, other=0))
    owner = ((hashed.to(tl.uint64, bitcast=True) >> 32) * ranks.to(tl.uint64)) >> 32
    part = owner.to(tl.int64) * slots + tl.load(of_feature + SLOT)
    tl.store(hashes + position, hashed)
    tl.store(parts + position, tl.where(wanted, part, ranks.to(tl.int64) * slots).to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def pack_keys(starts, order, hashes, parts, of_parts, uses, message, key_rows, count, GIVEN: tl.constexpr):
    """Write the distinct keys, which begin at `starts` of the sorted positions, and their uses.

    GIVEN: `uses` has those of each position; otherwise each is one.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    first = tl.load(starts + number, mask=valid, other=0)
    size = tl.load(starts + number + 1, mask=valid, other=0) - first
    of_part = of_parts + tl.load(parts + first, mask=valid, other=0) * PART_FIELDS
    key = unmix(tl.load(hashes + first, mask=valid, other=0))
    tl.store(message + (tl.load(of_part + WORD) + number), key, mask=valid)
    times = size
    if GIVEN:
        times = sum_uses(uses, order, first, size)
    of_uses = message.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(of_uses + (tl.load(of_part + USE) + number), times, mask=valid)
    row = tl.load(of_part + FIRST) + number * tl.load(of_part + UNITS)
    tl.store(key_rows + number, row.to(tl.int32), mask=valid)


@triton.jit(do_not_specialize=["size", "part_count"])
def number_rows(order, parts, numbers, of_parts, rows, size, part_count):
    """The row of each position, by the number of its key; 0 for positions that are not looked up."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < size
    position = tl.load(order + at, mask=valid, other=0)
    part = tl.load(parts + at, mask=valid, other=0)
    wanted = valid & (part < part_count)
    of_part = of_parts + tl.where(wanted, part, 0) * PART_FIELDS
    number = tl.load(numbers + at, mask=wanted, other=0)
    row = tl.load(of_part + FIRST) + number * tl.load(of_part + UNITS)
    tl.store(rows + position, tl.where(wanted, row, 0).to(tl.int32), mask=valid)


@triton.jit
def average_runs(
    work,
    order,
    starts,
    run_rows,
    features,
    feature_of,
    present,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Divide the gradients of each run's positions by their number; PARTIAL: of those that are `present`."""
    count = tl.load(work + UNIQUE)
    column = tl.arange(0, COLUMNS)[None, :]
    for start in range(tl.program_id(0) * GROUP, count, tl.num_programs(0) * GROUP):
        number = start + tl.arange(0, GROUP)
        valid = number < count
        first = tl.load(starts + number, mask=valid, other=0)
        size = tl.load(starts + number + 1, mask=valid, other=0) - first
        ranks = size
        if PARTIAL:
            ranks = sum_uses(present, order, first, size)
        divides = valid & (ranks > 1)
        divisor = tl.where(divides, ranks, 1).to(tl.float32)[:, None]
        for j in range(0, tl.max(size, axis=0)):
            inside = divides & (j < size)
            position = tl.load(order + first + j, mask=inside, other=0)
            of_feature = (
                features + tl.load(feature_of + position // BLOCK, mask=inside, other=0) * FEATURE_FIELDS
            )
            stride = tl.load(of_feature + GRADIENT_STRIDE)
            address = tl.load(of_feature + GRADIENT) + (position - tl.load(of_feature + BASE)) * stride * 4
            mask = inside[:, None] & (column < DIM)
            pointer = floats(address[:, None], column, 4)
            tl.store(pointer, tl.load(pointer, mask=mask, other=0.0) / divisor, mask=mask)
