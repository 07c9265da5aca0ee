"""Rows outside of training steps: erase, list, copy, load and capture them."""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    BIRTH,
    BLOCK,
    CHANGE,
    COUNT,
    COUNTERS,
    EVICTED,
    FREE_MASK,
    FREE_ROWS,
    FREE_TAIL,
    INSERTED,
    LAST,
    ROWS,
    UNIQUE,
    USED,
    field_pointer,
    floats,
    hash_pointer,
    read_vector,
    row_address,
    write_nearest,
)
from karvan.store.cuda.kernels.find import SPARE_LANES, claim, first_slot, mix, take_rows


@triton.jit(do_not_specialize=["count"])
def find_places(index, mask, hashes, count, places, rows):
    """The address of each hash's row in an index, and the row; 0 for those without one."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    hash_ = tl.load(hashes + number, mask=valid, other=0)
    sought = tl.where(hash_ == 0, 1, hash_)
    slot = first_slot(mask, hash_)
    place = tl.zeros_like(hash_)
    row = tl.zeros_like(hash_)
    open_ = valid
    remaining = 1
    while remaining > 0:
        at = index + slot * 16
        word = tl.load(at.to(tl.pointer_type(tl.int64)), mask=open_, other=0)
        hit = open_ & (word == sought)
        place = tl.where(hit, at + 8, place)
        row = tl.where(hit, tl.load((at + 8).to(tl.pointer_type(tl.int64)), mask=hit, other=0), row)
        open_ = open_ & ~hit & (word != 0)
        slot = tl.where(open_, (slot + 1) & mask, slot)
        remaining = tl.max(open_.to(tl.int32), axis=0)
    tl.store(places + number, place, mask=valid)
    tl.store(rows + number, row, mask=valid)


@triton.jit(do_not_specialize=["count", "table"])
def erase_places(
    places,
    rows,
    count,
    counters,
    table,
    arena,
    chunks,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Take the rows of slots away, distinct ones, and queue them as free; a row of 0 is passed over."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    row = tl.load(rows + number, mask=valid, other=0).to(tl.int32)
    place = tl.load(places + number, mask=valid, other=0)
    deleted = valid & (row > 0)
    tl.store(place.to(tl.pointer_type(tl.int64)), tl.zeros_like(place), mask=deleted)
    tl.store(field_pointer(chunks, row, BIRTH, SHIFT, STRIDE), -1, mask=deleted)
    total = tl.sum(deleted.to(tl.int64), axis=0)
    tail = tl.atomic_add(arena + FREE_TAIL, total) + tl.cumsum(deleted.to(tl.int64), axis=0) - 1
    queue = tl.load(arena + FREE_ROWS).to(tl.pointer_type(tl.int32))
    tl.store(queue + (tail & tl.load(arena + FREE_MASK)), row, mask=deleted)
    tl.atomic_add(counters + table * COUNTERS + ROWS, -total)
    tl.atomic_add(counters + table * COUNTERS + EVICTED, total)


@triton.jit(do_not_specialize=["first", "count"])
def list_slots(index, first, count, listed, hashes, rows, limits, SPECIAL: tl.constexpr):
    """The hashes and rows of an index's slots whose hash, as unsigned, lies within the two `limits`."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    words = index + (first + number).to(tl.int64) * 16
    hash_ = tl.load(words.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    row = tl.load((words + 8).to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    if SPECIAL:
        hash_ = tl.zeros_like(hash_)
    unsigned = hash_.to(tl.uint64, bitcast=True)
    least = tl.load(limits).to(tl.uint64, bitcast=True)
    most = tl.load(limits + 1).to(tl.uint64, bitcast=True)
    chosen = valid & (row > 0) & (unsigned >= least) & (unsigned <= most)
    at = (
        tl.atomic_add(listed, tl.sum(chosen.to(tl.int64), axis=0))
        + tl.cumsum(chosen.to(tl.int64), axis=0)
        - 1
    )
    tl.store(hashes + at, hash_, mask=chosen)
    tl.store(rows + at, row.to(tl.int32), mask=chosen)


@triton.jit(do_not_specialize=["count"])
def read_fields(
    rows, count, chunks, hashes, counts, lasts, changes, SHIFT: tl.constexpr, STRIDE: tl.constexpr
):
    """The hash, count, last step and change of rows."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    row = tl.load(rows + number, mask=valid, other=0)
    tl.store(hashes + number, tl.load(hash_pointer(chunks, row, SHIFT, STRIDE)), mask=valid)
    tl.store(counts + number, tl.load(field_pointer(chunks, row, COUNT, SHIFT, STRIDE)), mask=valid)
    tl.store(lasts + number, tl.load(field_pointer(chunks, row, LAST, SHIFT, STRIDE)), mask=valid)
    tl.store(changes + number, tl.load(field_pointer(chunks, row, CHANGE, SHIFT, STRIDE)), mask=valid)


@triton.jit(do_not_specialize=["count"])
def read_vectors(
    rows,
    count,
    chunks,
    vectors,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """The vectors of rows, as float32."""
    number = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    valid = number < count
    row = tl.load(rows + number, mask=valid, other=0)
    address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = valid[:, None] & (column < DIM)
    to = number[:, None].to(tl.int64)
    tl.store(vectors + to * DIM + column, read_vector(address, column, mask, TYPE), mask=mask)


@triton.jit
def copy_words(source, target, valid, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy words of 4 bytes from addresses to addresses, all multiples of 16, where `there`."""
    for start in range(0, WORDS, COLUMNS):
        column = (start + tl.arange(0, COLUMNS))[None, :]
        mask = valid[:, None] & (column < WORDS)
        words = tl.load(floats(source[:, None], column, 16), mask=mask, other=0.0)
        tl.store(floats(target[:, None], column, 16), words, mask=mask)


@triton.jit(do_not_specialize=["count"])
def copy_rows(
    rows,
    count,
    chunks,
    target,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy rows, as they are in memory, to an address."""
    number = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    valid = number < count
    row = tl.load(rows + number, mask=valid, other=0)
    to = target + number.to(tl.int64) * STRIDE
    copy_words(row_address(chunks, row, SHIFT, STRIDE), to, valid, STRIDE // 4, COLUMNS)


@triton.jit(do_not_specialize=["count", "version"])
def write_rows(
    rows,
    count,
    chunks,
    vectors,
    states,
    counts,
    lasts,
    version,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Overwrite rows with vectors, optimizer state, counts and last steps."""
    number = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    valid = number < count
    row = tl.load(rows + number, mask=valid, other=0)
    valid = valid & (row > 0)
    address = row_address(chunks, row, SHIFT, STRIDE)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = valid[:, None] & (column < DIM)
    at = number[:, None].to(tl.int64)
    value = tl.load(vectors + at * DIM + column, mask=mask, other=0.0)
    write_nearest(address, column, value, mask, TYPE)
    if STATE > 0:
        field = tl.arange(0, STATES)[None, :]
        mask = valid[:, None] & (field < STATE)
        state = tl.load(states + at * STATE + field, mask=mask, other=0.0)
        tl.store(floats(address + VECTOR, field, 16 if VECTOR % 16 == 0 else 4), state, mask=mask)
    uses = tl.load(counts + number, mask=valid, other=0)
    tl.store(field_pointer(chunks, row, COUNT, SHIFT, STRIDE), uses, mask=valid)
    last = tl.load(lasts + number, mask=valid, other=0)
    tl.store(field_pointer(chunks, row, LAST, SHIFT, STRIDE), last, mask=valid)
    tl.store(field_pointer(chunks, row, CHANGE, SHIFT, STRIDE), version, mask=valid)


@triton.jit(do_not_specialize=["count", "table", "version"])
def insert_keys(
    index,
    mask,
    keys,
    count,
    counters,
    table,
    arena,
    chunks,
    version,
    spare,
    rows,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """The rows of distinct keys, which get one where they have none."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    hashes = mix(tl.load(keys + number, mask=valid, other=0))
    lanes = spare + (number % SPARE_LANES).to(tl.int64) * 16
    slot = first_slot(mask, hashes)
    place, claimed = claim(index, mask, slot, hashes, valid, lanes)
    old = tl.load(place.to(tl.pointer_type(tl.int64)), mask=valid, other=1)
    new = valid & (old == 0)
    row = tl.where(new, take_rows(arena, new), old)
    number32 = row.to(tl.int32)
    tl.store(place.to(tl.pointer_type(tl.int64)), row, mask=new)
    tl.store(hash_pointer(chunks, number32, SHIFT, STRIDE), hashes, mask=new)
    tl.store(field_pointer(chunks, number32, BIRTH, SHIFT, STRIDE), version, mask=new)
    total = tl.sum(new.to(tl.int64), axis=0)
    tl.atomic_add(counters + table * COUNTERS + USED, tl.sum(claimed.to(tl.int64), axis=0))
    tl.atomic_add(counters + table * COUNTERS + ROWS, total)
    tl.atomic_add(counters + table * COUNTERS + INSERTED, total)
    tl.store(rows + number, number32, mask=valid)


# Kernels of captures: rows copied in the background, and rows saved before they change.
#
# `pending` has a number for each row of an arena: 1 + the row's index in the list of a capture, or 0. A row
# that was copied or saved is not pending any more. Kernels of both kinds never run at the same time.


@triton.jit(do_not_specialize=["first", "count"])
def gather_rows(
    rows,
    first,
    count,
    pending,
    saved,
    report,
    chunks,
    target,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy those of the rows [first, first + count) of a list that are pending to an address.

    report, chunks, target: addresses; at `report`, note how many rows were saved so far.
    """
    number = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    valid = number < count
    row = tl.load(rows + first + number, mask=valid, other=0)
    valid = valid & (tl.load(pending + row, mask=valid, other=0) == first + number + 1)
    source = row_address(chunks.to(tl.pointer_type(tl.int64)), row, SHIFT, STRIDE)
    copy_words(source, target + number.to(tl.int64) * STRIDE, valid, STRIDE // 4, COLUMNS)
    tl.store(pending + row, tl.zeros_like(row), mask=valid)
    if tl.program_id(0) == 0:
        tl.store(report.to(tl.pointer_type(tl.int64)), tl.load(saved))


@triton.jit(do_not_specialize=["most", "limit"])
def save_rows(
    rows,
    work,
    most,
    pending,
    limit,
    saved,
    places,
    chunks,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Copy those of distinct rows that are pending to the next free places, with their indices in the list.

    RUNS: as many rows as the lookup of `work` has runs; `most` otherwise. limit: rows from it on are new.
    places: addresses of PLACES places each, first the rows, then their indices.
    """
    count = most
    if RUNS:
        count = tl.load(work + UNIQUE)
    for start in range(tl.program_id(0) * GROUP, count, tl.num_programs(0) * GROUP):
        number = start + tl.arange(0, GROUP)
        row = tl.load(rows + number, mask=number < count, other=0).to(tl.int32)
        index = tl.load(pending + row, mask=row < limit, other=0) - 1
        present = index >= 0
        total = tl.sum(present.to(tl.int64), axis=0)
        if total > 0:
            place = tl.atomic_add(saved, total) + tl.cumsum(present.to(tl.int64), axis=0) - 1
            address = tl.load(places + (place // PLACES), mask=present, other=0)
            local = place % PLACES
            source = row_address(chunks, row, SHIFT, STRIDE)
            copy_words(source, address + local * STRIDE, present, STRIDE // 4, COLUMNS)
            indices = (address + STRIDE * PLACES + local * 4).to(tl.pointer_type(tl.int32))
            tl.store(indices, index, mask=present)
            tl.store(pending + row, tl.zeros_like(row), mask=present)
