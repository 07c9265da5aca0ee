"""Which unknown keys get a row, for tables that do not admit all of them.

The missing positions of a table are grouped by key in a small index of the batch, whose slots hold (hash,
occurrences). Then each key is decided on once, and the positions of admitted ones are inserted.
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    BASE,
    BLOCK,
    COUNTERS,
    FEATURE_FIELDS,
    MASK,
    MISSING,
    REJECTED,
    STEP,
    STREAM,
    TABLE,
    TABLE_FIELDS,
    VALUES,
)
from karvan.store.cuda.kernels.find import SPARE_LANES, claim, draw, first_slot, insert_rows, mix

PROBABILITY = tl.constexpr(1)
MIN_COUNT = tl.constexpr(2)
PROBABILITY_EACH = tl.constexpr(3)


@triton.jit
def _missing_keys(features, feature_of, missing, work, table, start):
    number = start + tl.arange(0, BLOCK)
    valid = number < tl.load(work + MISSING)
    position = tl.load(missing + number, mask=valid, other=0)
    of_feature = features + tl.load(feature_of + position // BLOCK) * FEATURE_FIELDS
    valid = valid & (tl.load(of_feature + TABLE) == table)
    values = tl.load(of_feature + VALUES).to(tl.pointer_type(tl.int64))
    key = tl.load(values + (position - tl.load(of_feature + BASE)), mask=valid, other=0)
    return number, position, mix(key), valid


@triton.jit
def nominate_keys(
    features,
    feature_of,
    missing,
    work,
    uses,
    table,
    index,
    mask,
    spare,
    places,
    WIDTH: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """Count the occurrences of each missing key of a table; GIVEN: `uses` has those of each position."""
    start = tl.program_id(0) * BLOCK
    number, position, hashes, valid = _missing_keys(features, feature_of, missing, work, table, start)
    slot = first_slot(mask, hashes, WIDTH)
    place, _ = claim(index, mask, slot, hashes, valid, spare + (number % SPARE_LANES).to(tl.int64) * 16)
    times = tl.full(hashes.shape, 1, tl.int64)
    if GIVEN:
        times = tl.load(uses + position, mask=valid, other=0).to(tl.int64)
    tl.atomic_add(place.to(tl.pointer_type(tl.int64)), times, mask=valid)
    tl.store(places + number, place, mask=valid)


@triton.jit
def _nominee(index, slots):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = slot <= slots
    words = index + slot.to(tl.int64) * 16
    hashes = tl.load(words.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    times = tl.load((words + 8).to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    return tl.where(slot == slots, 0, hashes), times, words + 8, valid & (hashes != 0)


@triton.jit
def _filter_place(hashes, blocks, number: tl.constexpr):
    block = tl.umulhi(hashes.to(tl.uint64, bitcast=True), blocks.to(tl.uint64)).to(tl.int64)
    return block * 64 + ((hashes >> (6 * number)) & 63)


@triton.jit
def count_nominees(index, slots, filter_, blocks):
    """Add the occurrences of keys without a row to the counters of their table's filter."""
    hashes, times, _, valid = _nominee(index, slots)
    add = tl.minimum(times, 255).to(tl.int32)
    first = _filter_place(hashes, blocks, 0)
    second = _filter_place(hashes, blocks, 1)
    third = _filter_place(hashes, blocks, 2)
    fourth = _filter_place(hashes, blocks, 3)
    tl.atomic_add(filter_ + first, add, mask=valid)  # places that coincide count once
    tl.atomic_add(filter_ + second, add, mask=valid & (second != first))
    tl.atomic_add(filter_ + third, add, mask=valid & (third != first) & (third != second))
    alone = (fourth != first) & (fourth != second) & (fourth != third)
    tl.atomic_add(filter_ + fourth, add, mask=valid & alone)


@triton.jit
def decide_nominees(
    index, slots, filter_, blocks, tables, table, counters, head, probability, least, KIND: tl.constexpr
):
    """Replace the occurrences of each key by 1 if it gets a row, by 0 otherwise."""
    hashes, _, place, valid = _nominee(index, slots)
    admitted = valid & False
    if (KIND == PROBABILITY) | (KIND == PROBABILITY_EACH):
        stream = tl.load(tables + table * TABLE_FIELDS + STREAM)
        if KIND == PROBABILITY:
            drawn = mix(hashes ^ stream).to(tl.uint64, bitcast=True)
        else:
            drawn = draw(mix(hashes ^ mix(stream)), tl.load(head + STEP))
        share = (drawn >> 11).to(tl.float64) * 1.1102230246251565e-16
        admitted = valid & (share < tl.load(probability))
    elif KIND == MIN_COUNT:
        count = tl.load(filter_ + _filter_place(hashes, blocks, 0), mask=valid, other=0)
        count = tl.minimum(count, tl.load(filter_ + _filter_place(hashes, blocks, 1), mask=valid, other=0))
        count = tl.minimum(count, tl.load(filter_ + _filter_place(hashes, blocks, 2), mask=valid, other=0))
        count = tl.minimum(count, tl.load(filter_ + _filter_place(hashes, blocks, 3), mask=valid, other=0))
        admitted = valid & (count >= least)
    tl.store(place.to(tl.pointer_type(tl.int64)), admitted.to(tl.int64), mask=valid)
    rejected = tl.sum((valid & ~admitted).to(tl.int64), axis=0)
    if rejected > 0:
        tl.atomic_add(counters + table * COUNTERS + REJECTED, rejected)


@triton.jit
def insert_admitted(
    features,
    feature_of,
    missing,
    places,
    tables,
    table,
    counters,
    arena,
    chunks,
    work,
    rows,
    fresh_rows,
    fresh_tables,
    pending,
    pending_places,
    spare,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Insert the admitted keys among the missing ones of a table."""
    start = tl.program_id(0) * BLOCK
    number, position, hashes, valid = _missing_keys(features, feature_of, missing, work, table, start)
    place = tl.load(places + number, mask=valid, other=0)
    wanted = valid & (tl.load(place.to(tl.pointer_type(tl.int64)), mask=valid, other=0) == 1)
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        row = insert_rows(
            tables,
            table,
            counters,
            arena,
            chunks,
            work,
            fresh_rows,
            fresh_tables,
            pending,
            pending_places,
            spare + (number % SPARE_LANES).to(tl.int64) * 16,
            first_slot(tl.load(tables + table * TABLE_FIELDS + MASK), hashes, WIDTH),
            hashes,
            position,
            wanted,
            SHIFT,
            STRIDE,
        )
        tl.store(rows + position, row.to(tl.int32), mask=wanted & (row > 0))
