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
    REJECTED,
    ROWS,
    STACK,
    STEP,
    STREAM,
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
    return _scrambled(key, _MIX)


@triton.jit
def unmix(hashes):
    """The keys of hashes."""
    return _scrambled(hashes, _UNMIX)


@triton.jit
def _scrambled(numbers, FACTOR: tl.constexpr):
    h = numbers.to(tl.uint64, bitcast=True)
    for _ in tl.static_range(2):
        h = h ^ (h >> 32)
        h = h * FACTOR
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
WIDTH = tl.constexpr(4)  # slots that a search reads at a time


@triton.jit
def feature_at(features, count, place, FIELD: tl.constexpr, FEATURES: tl.constexpr):
    """The feature that has a place: the last whose FIELD, such as its first position, is not beyond it."""
    number = tl.arange(0, FEATURES)
    base = tl.load(features + number * FEATURE_FIELDS + FIELD, mask=number < count, other=1 << 62)
    return tl.sum((base <= place).to(tl.int32)) - 1


@triton.jit
def first_slot(mask, hashes):
    """Where the search for hashes begins."""
    return tl.where(hashes == 0, mask + 1, hashes & mask & -WIDTH)


@triton.jit
def probe(index, mask, hashes, wanted):
    """The rows of hashes, 0 for those without one, where `wanted`; and the slots where the searches ended.

    From there on a hash without a slot may get one: there is an empty slot among the WIDTH ones.
    """
    pointers = index.to(tl.pointer_type(tl.int64))
    sought = tl.where(hashes == 0, 1, hashes)[:, None]
    slot = first_slot(mask, hashes)
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
    memory,
    fresh,
    table,
    spare,
    slot,
    hashes,
    position,
    wanted,
    SHIFT: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Give rows to hashes of one table, where `wanted`; returns the rows that this program inserted.

    memory: tables, counters of tables and of the arena, chunks, and counters of the lookup. fresh: lists of
    new rows and their tables, and of pending positions and places. slot: where to look for a place, for each
    hash. The other lanes wait for another program: their positions are added to `pending`.
    """
    tables, counters, arena, chunks, work = memory
    fresh_rows, fresh_tables, pending, pending_places = fresh
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
    feature = feature_at(features, feature_count, start, BASE, FEATURES)
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
    row, slot = probe(tl.load(of_table + INDEX), tl.load(of_table + MASK), hashes, wanted)
    if GROWS:
        old = tl.load(of_table + OLD_INDEX)
        lacks = wanted & (row == 0)
        if (old != 0) & (tl.max(lacks.to(tl.int32), axis=0) > 0):
            before, _ = probe(old, tl.load(of_table + OLD_MASK), hashes, lacks)
            row += before
    if INSERTS:
        lacks = wanted & (row == 0)
        lacking = tl.sum(lacks.to(tl.int32), axis=0)
        if lacking > 0:
            if tl.load(of_table + ADMITS) == 1:
                memory = (tables, counters, arena, chunks, work)
                fresh = (fresh_rows, fresh_tables, pending, pending_places)
                lanes = spare + (position % SPARE_LANES).to(tl.int64) * 16
                row += insert_rows(memory, fresh, table, lanes, slot, hashes, position, lacks, SHIFT, STRIDE)
            else:
                at = tl.atomic_add(work + MISSING, lacking) + tl.cumsum(lacks.to(tl.int32), axis=0) - 1
                tl.store(missing + at, position, mask=lacks)
    tl.store(rows + position, row.to(tl.int32))


# Growth of an index: its slots move to a larger one, some in each step, while lookups use both.


@triton.jit(do_not_specialize=["table", "first", "count"])
def move_slots(old, old_mask, index, mask, counters, table, spare, first, count):
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
    place, claimed = claim(index, mask, first_slot(mask, hashes), hashes, wanted, lanes)
    tl.store(place.to(tl.pointer_type(tl.int64)), row, mask=wanted)
    tl.atomic_add(counters + table * COUNTERS + USED, tl.sum(claimed.to(tl.int64), axis=0))


# Which unknown keys get a row, for tables that do not admit all of them.
#
# The missing positions of a table are grouped by key in a small index of the batch, whose slots hold (hash,
# occurrences). Then each key is decided on once, and the positions of admitted ones are inserted.

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
    GIVEN: tl.constexpr,
):
    """Count the occurrences of each missing key of a table; GIVEN: `uses` has those of each position."""
    start = tl.program_id(0) * BLOCK
    number, position, hashes, valid = _missing_keys(features, feature_of, missing, work, table, start)
    slot = first_slot(mask, hashes)
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
        count = tl.full(hashes.shape, 255, tl.int32)
        for number in tl.static_range(4):
            counter = filter_ + _filter_place(hashes, blocks, number)
            count = tl.minimum(count, tl.load(counter, mask=valid, other=0))
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
):
    """Insert the admitted keys among the missing ones of a table."""
    start = tl.program_id(0) * BLOCK
    number, position, hashes, valid = _missing_keys(features, feature_of, missing, work, table, start)
    place = tl.load(places + number, mask=valid, other=0)
    wanted = valid & (tl.load(place.to(tl.pointer_type(tl.int64)), mask=valid, other=0) == 1)
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        memory = (tables, counters, arena, chunks, work)
        fresh = (fresh_rows, fresh_tables, pending, pending_places)
        lanes = spare + (number % SPARE_LANES).to(tl.int64) * 16
        slot = first_slot(tl.load(tables + table * TABLE_FIELDS + MASK), hashes)
        row = insert_rows(memory, fresh, table, lanes, slot, hashes, position, wanted, SHIFT, STRIDE)
        tl.store(rows + position, row.to(tl.int32), mask=wanted & (row > 0))
