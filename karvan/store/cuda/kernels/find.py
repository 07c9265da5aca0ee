"""Rows of a batch's keys: find them, and insert those of unknown keys.

An index is open addressing with linear probing: slots of two int64, a hash and a row. A search starts at a
multiple of WIDTH and reads WIDTH slots at a time; the hash 0 means an empty slot and ends it. The key whose
hash is 0 has a slot of its own, behind the others, with the hash 1. A slot whose row is 0 has lost its row;
it keeps its key until the index grows.

New keys: a program claims a slot by exchanging its hash 0 for the key's, and the right to give it a row by
exchanging its row 0 for -1. Others that want the same key at the same time find the row later (`finish`).
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    ADMITS,
    BASE,
    BIRTH,
    BLOCK,
    CELLS,
    CHANGE,
    COUNT,
    COUNTERS,
    FEATURE_FIELDS,
    FREE_HEAD,
    FREE_MASK,
    FREE_ROWS,
    FREE_TAIL,
    FRESH,
    INDEX,
    INSERTED,
    LAST,
    MASK,
    MISSING,
    NEXT_ROW,
    OLD_INDEX,
    OLD_MASK,
    PENDING,
    PLAIN_END,
    ROWS,
    STACK,
    TABLE,
    TABLE_FIELDS,
    USED,
    VALUES,
    VERSION,
    field_pointer,
    hash_pointer,
)

# The key mix and the random draws of csrc/hash/mix.h and csrc/table/init.h, bit for bit.


_MIX = tl.constexpr(0xD6E8FEB86659FD93)
_UNMIX = tl.constexpr(0xCFEE444D8B59A89B)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(key):
    """The hash of keys, both int64: a bijection."""
    h = key.to(tl.uint64, bitcast=True)
    h = h ^ (h >> 32)
    h = h * _MIX
    h = h ^ (h >> 32)
    h = h * _MIX
    h = h ^ (h >> 32)
    return h.to(tl.int64, bitcast=True)


@triton.jit
def unmix(hashes):
    """The keys of hashes."""
    h = hashes.to(tl.uint64, bitcast=True)
    h = h ^ (h >> 32)
    h = h * _UNMIX
    h = h ^ (h >> 32)
    h = h * _UNMIX
    h = h ^ (h >> 32)
    return h.to(tl.int64, bitcast=True)


@triton.jit
def draw(state, number):
    """Output `number` of SplitMix64 that starts at `state`, both int64; as uint64."""
    z = state.to(tl.uint64, bitcast=True) + (number.to(tl.uint64) + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)


@triton.jit
def rounding_noise(hashes, step, column):
    """16 random bits for each (row, column) of an update: csrc/kernels/simd.inc, noise_bits."""
    seed = (hashes ^ step).to(tl.uint64, bitcast=True) * _GOLDEN
    seed = seed ^ (seed >> 29)
    x = (seed & 0xFFFFFFFF).to(tl.uint32) + column.to(tl.uint32) * 0x9E3779B9
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (seed >> 32).to(tl.uint32)
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return (x ^ (x >> 15)) & 0xFFFF


SPARE_LANES = tl.constexpr(1 << 17)


@triton.jit
def feature_of_position(features, count, position, FEATURES: tl.constexpr):
    """The feature that has a position."""
    number = tl.arange(0, FEATURES)
    base = tl.load(features + number * FEATURE_FIELDS + BASE, mask=number < count, other=1 << 62)
    return tl.sum((base <= position).to(tl.int32)) - 1


@triton.jit
def first_slot(mask, hashes, WIDTH: tl.constexpr):
    """Where the search for hashes begins."""
    return tl.where(hashes == 0, mask + 1, hashes & mask & -WIDTH)


@triton.jit
def probe(index, mask, hashes, wanted, WIDTH: tl.constexpr):
    """The rows of hashes, 0 for those without one, where `wanted`; and the slots where the searches ended.

    From there on a hash without a slot may get one: there is an empty slot among the WIDTH ones.
    """
    pointers = index.to(tl.pointer_type(tl.int64))
    sought = tl.where(hashes == 0, 1, hashes)[:, None]
    slot = first_slot(mask, hashes, WIDTH)
    column = tl.arange(0, 2 * WIDTH)[None, :]
    row = tl.zeros_like(hashes)
    open_ = wanted
    open_count = 1
    while open_count > 0:
        at = pointers + (slot[:, None] * 2 + column)
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 2 * WIDTH))
        words = tl.load(at, mask=open_[:, None], other=0)
        tags, rows = tl.split(tl.reshape(words, [words.shape[0], WIDTH, 2]))
        hit = (tags == sought) & open_[:, None]
        row += tl.sum(tl.where(hit & (rows > 0), rows, 0), axis=1)  # -1: another program is inserting it
        ends = tl.max((hit | (tags == 0)).to(tl.int32), axis=1)
        open_ = open_ & (ends == 0)
        slot = tl.where(open_, (slot + WIDTH) & mask, slot)
        open_count = tl.max(open_.to(tl.int32), axis=0)
    return row, slot


@triton.jit
def claim(index, mask, slot, hashes, wanted, spare):
    """Slots for hashes from `slot` on, where `wanted`: (the address of the slot's row, whether it was empty).

    spare: an address of 16 bytes for each lane, where idle ones exchange words: atomic operations have no
    mask, and would be slow if all idle lanes met at one address.
    """
    sought = tl.where(hashes == 0, 1, hashes)
    place = spare + 8
    fresh = wanted & False
    open_ = wanted
    remaining = tl.max(open_.to(tl.int32), axis=0)
    while remaining > 0:
        at = index + slot * 16
        word = tl.load(at.to(tl.pointer_type(tl.int64)), mask=open_, other=1)
        empty = open_ & (word == 0)
        target = tl.where(empty, at, spare).to(tl.pointer_type(tl.int64))
        old = tl.atomic_cas(target, tl.zeros_like(sought), sought)
        won = empty & (old == 0)
        done = open_ & ((word == sought) | won | (empty & (old == sought)))
        place = tl.where(done, at + 8, place)
        fresh = fresh | won
        open_ = open_ & ~done
        slot = tl.where(open_, (slot + 1) & mask, slot)
        remaining = tl.max(open_.to(tl.int32), axis=0)
    return place, fresh


@triton.jit
def take_rows(arena, wanted):
    """A free row for each lane that wants one."""
    count = tl.sum(wanted.to(tl.int64), axis=0)
    rank = tl.cumsum(wanted.to(tl.int64), axis=0) - 1
    head = tl.atomic_add(arena + FREE_HEAD, count)
    free = tl.minimum(tl.maximum(tl.load(arena + FREE_TAIL) - head, 0), count)
    first = tl.atomic_add(arena + NEXT_ROW, count - free)
    queue = tl.load(arena + FREE_ROWS).to(tl.pointer_type(tl.int32))
    queued = tl.load(
        queue + ((head + rank) & tl.load(arena + FREE_MASK)), mask=wanted & (rank < free), other=0
    )
    return tl.where(rank < free, queued.to(tl.int64), first + rank - free)


@triton.jit
def insert_rows(
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
    spare,
    slot,
    hashes,
    position,
    wanted,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Give rows to hashes of one table, where `wanted`; returns the rows that this program inserted.

    slot: where to look for a place, for each hash.
    The other lanes wait for another program: their positions are added to `pending`.
    """
    of_table = tables + table * TABLE_FIELDS
    index = tl.load(of_table + INDEX)
    mask = tl.load(of_table + MASK)
    place, claimed = claim(index, mask, slot, hashes, wanted, spare)
    minus = tl.full(hashes.shape, -1, tl.int64)
    old = tl.atomic_cas(place.to(tl.pointer_type(tl.int64)), tl.zeros_like(hashes), minus)
    mine = wanted & (old == 0)
    row = tl.where(mine, take_rows(arena, mine), 0)
    count = tl.sum(mine.to(tl.int64), axis=0)
    number = row.to(tl.int32)
    tl.store(hash_pointer(chunks, number, SHIFT, STRIDE), hashes, mask=mine)
    tl.store(field_pointer(chunks, number, COUNT, SHIFT, STRIDE), 0, mask=mine)
    tl.store(field_pointer(chunks, number, LAST, SHIFT, STRIDE), 0, mask=mine)
    version = tl.load(of_table + VERSION).to(tl.int32)
    tl.store(field_pointer(chunks, number, BIRTH, SHIFT, STRIDE), version, mask=mine)
    tl.store(field_pointer(chunks, number, CHANGE, SHIFT, STRIDE), version, mask=mine)
    tl.store(place.to(tl.pointer_type(tl.int64)), row, mask=mine)
    counts = counters + table * COUNTERS
    tl.atomic_add(counts + USED, tl.sum(claimed.to(tl.int64), axis=0))
    tl.atomic_add(counts + ROWS, count)
    tl.atomic_add(counts + INSERTED, count)
    at = tl.atomic_add(work + FRESH, count.to(tl.int32)) + tl.cumsum(mine.to(tl.int32), axis=0) - 1
    tl.store(fresh_rows + at, number, mask=mine)
    tl.store(fresh_tables + at, (tl.zeros_like(number) + table).to(tl.int32), mask=mine)
    waits = wanted & (old != 0)
    row = tl.where(waits & (old > 0), old, row)  # somebody has finished it already
    waits = waits & (old < 0)
    at = tl.atomic_add(work + PENDING, tl.sum(waits.to(tl.int32), axis=0))
    at = at + tl.cumsum(waits.to(tl.int32), axis=0) - 1
    tl.store(pending + at, position.to(tl.int32), mask=waits)
    tl.store(pending_places + at, place, mask=waits)
    return row


@triton.jit
def find_rows(
    features,
    feature_count,
    tables,
    counters,
    arena,
    chunks,
    work,
    rows,
    feature_of,
    out_rows,
    fresh_rows,
    fresh_tables,
    pending,
    pending_places,
    missing,
    spare,
    head,
    FEATURES: tl.constexpr,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    INSERTS: tl.constexpr,
    MAPPED: tl.constexpr,
    GROWS: tl.constexpr,
):
    """The row of each position, 0 for none; with INSERTS, keys that have none get one.

    A program has the positions of one feature. Keys of tables that do not admit every key are only added to
    `missing`. MAPPED: positions of other than plain features whose output row
    is -1 are not looked up. GROWS: a table has an old index.
    """
    start = tl.program_id(0) * BLOCK
    feature = feature_of_position(features, feature_count, start, FEATURES)
    tl.store(feature_of + tl.program_id(0), feature)
    of_feature = features + feature * FEATURE_FIELDS
    table = tl.load(of_feature + TABLE)
    lane = tl.arange(0, BLOCK)
    position = start + lane
    number = position - tl.load(of_feature + BASE)
    wanted = number < tl.load(of_feature + CELLS) * tl.load(of_feature + STACK)
    if MAPPED:
        wanted = wanted & ((position < tl.load(head + PLAIN_END)) | (tl.load(out_rows + position) >= 0))
    values = tl.load(of_feature + VALUES).to(tl.pointer_type(tl.int64))
    hashes = mix(tl.load(values + number, mask=wanted, other=0))
    of_table = tables + table * TABLE_FIELDS
    row, slot = probe(tl.load(of_table + INDEX), tl.load(of_table + MASK), hashes, wanted, WIDTH)
    if GROWS:
        old = tl.load(of_table + OLD_INDEX)
        lacks = wanted & (row == 0)
        if (old != 0) & (tl.max(lacks.to(tl.int32), axis=0) > 0):
            before, _ = probe(old, tl.load(of_table + OLD_MASK), hashes, lacks, WIDTH)
            row += before
    if INSERTS:
        lacks = wanted & (row == 0)
        lacking = tl.sum(lacks.to(tl.int32), axis=0)
        if lacking > 0:
            if tl.load(of_table + ADMITS) == 1:
                row += insert_rows(
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
                    spare + (position % SPARE_LANES).to(tl.int64) * 16,
                    slot,
                    hashes,
                    position,
                    lacks,
                    SHIFT,
                    STRIDE,
                )
            else:
                at = tl.atomic_add(work + MISSING, lacking) + tl.cumsum(lacks.to(tl.int32), axis=0) - 1
                tl.store(missing + at, position, mask=lacks)
    tl.store(rows + position, row.to(tl.int32))


# Growth of an index: its slots move to a larger one, some in each step, while lookups use both.


@triton.jit(do_not_specialize=["table", "first", "count"])
def move_slots(old, old_mask, index, mask, counters, table, spare, first, count, WIDTH: tl.constexpr):
    """Copy the slots [first, first + count) of an old index that have a row into the new one.

    Slot old_mask + 1 is that of the key whose hash is 0.
    """
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = first + number
    valid = number < count
    words = old + slot.to(tl.int64) * 16
    hashes = tl.load(words.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    row = tl.load((words + 8).to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    wanted = valid & (row > 0)
    hashes = tl.where(slot == old_mask + 1, 0, hashes)
    lanes = spare + (number % SPARE_LANES).to(tl.int64) * 16
    place, claimed = claim(index, mask, first_slot(mask, hashes, WIDTH), hashes, wanted, lanes)
    tl.store(place.to(tl.pointer_type(tl.int64)), row, mask=wanted)
    tl.atomic_add(counters + table * COUNTERS + USED, tl.sum(claimed.to(tl.int64), axis=0))
