"""Exchanges of locations: rows of a batch that are in host memory, for rows on the device that are used less.

An exchange has three steps, each a kernel, so that none of them meets the half-done work of another:

1. `collect_rows` marks the device locations of the rows of a batch, which must stay, and lists its rows that
   have none: a program that takes a row's place from ON_HOST to TAKEN has it, so each row is listed once.
2. `choose_places` looks at some device locations for each of these rows, and takes the one whose row is worth
   least by marking it: whoever changes the mark has the location. Then it exchanges the two rows' addresses.
   A row that is found no location keeps its own.
3. `swap_rows` exchanges what is at these pairs of addresses, of which each address is in one pair.

What a row is worth: its uses, and less the longer ago the last one was. Which programs come first may decide
which location a row gets, and so how fast its next lookup is, but never a value.
"""

import triton
import triton.language as tl

from karvan.store.cuda.kernels.fields import (
    BIRTH,
    BLOCK,
    COUNT,
    COUNTERS,
    FEATURE_FIELDS,
    LAST,
    TABLE,
    TIER_EXCHANGES,
    TIER_HITS,
    TIER_MISSES,
    UNIQUE,
    field_pointer,
)

ON_HOST = tl.constexpr(-1)  # a row's place, if it has no device location
TAKEN = tl.constexpr(-2)  # and is listed

# The head of an exchange.
MARK = tl.constexpr(0)
NOW = tl.constexpr(1)  # the step
DEVICE_ROWS = tl.constexpr(2)  # locations on the device
ROW_NUMBERS = tl.constexpr(3)  # that there are
EXCHANGE_HEAD = tl.constexpr(4)

# Counters of an exchange.
LISTED = tl.constexpr(0)
PAIRS = tl.constexpr(1)
TALLY = tl.constexpr(2)

TRIES = tl.constexpr(8)  # locations that a row looks at
_HALF_LIFE = tl.constexpr(64.0)  # steps without a use after which a row is worth half
_TABLES = tl.constexpr(32)  # that are counted at a time


@triton.jit(do_not_specialize=["size", "table_count"])
def collect_rows(
    rows,
    size,
    work,
    starts,
    order,
    features,
    feature_of,
    head,
    places,
    marks,
    counters,
    table_count,
    tally,
    listed,
    listed_tables,
    RUNS: tl.constexpr,
):
    """Mark the locations of rows on the device, and list the others, once each.

    RUNS: rows are those of a lookup's runs, which are counted by table as hits and misses. Otherwise they are
    those of the positions of the next batch, whose tables are listed as -1 - table.
    """
    count = size
    if RUNS:
        count = tl.load(work + UNIQUE)
    mark = tl.load(head + MARK).to(tl.int32)
    numbers = tl.load(head + ROW_NUMBERS)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        number = start + tl.arange(0, BLOCK)
        valid = number < count
        row = tl.load(rows + number, mask=valid, other=0)
        valid = valid & (row > 0) & (row < numbers)
        if RUNS:
            first = tl.load(starts + number, mask=valid, other=0)
            position = tl.load(order + first, mask=valid, other=0)
            feature = tl.load(feature_of + position // BLOCK, mask=valid, other=0)
        else:
            feature = tl.load(feature_of + number // BLOCK, mask=valid, other=0)
        table = tl.load(features + feature * FEATURE_FIELDS + TABLE, mask=valid, other=0).to(tl.int32)
        place = tl.load(places + row, mask=valid, other=TAKEN)
        present = valid & (place >= 0)
        tl.store(marks + place, mark, mask=present)
        absent = valid & (place == ON_HOST)
        old = tl.atomic_xchg(places + row, tl.full(row.shape, TAKEN, tl.int32), mask=absent)
        mine = absent & (old == ON_HOST)
        total = tl.sum(mine.to(tl.int32), axis=0)
        if total > 0:
            at = tl.atomic_add(tally + LISTED, total) + tl.cumsum(mine.to(tl.int32), axis=0) - 1
            tl.store(listed + at, row, mask=mine)
            tl.store(listed_tables + at, table if RUNS else -1 - table, mask=mine)
        if RUNS:
            missed = valid & (place < 0)  # also those that the next batch has listed
            for base in range(0, table_count, _TABLES):
                table_numbers = base + tl.arange(0, _TABLES)
                same = table[:, None] == table_numbers[None, :]
                hits = tl.sum((same & present[:, None]).to(tl.int64), axis=0)
                misses = tl.sum((same & missed[:, None]).to(tl.int64), axis=0)
                addresses = counters + table_numbers * COUNTERS
                tl.atomic_add(addresses + TIER_HITS, hits, mask=hits > 0)
                tl.atomic_add(addresses + TIER_MISSES, misses, mask=misses > 0)


@triton.jit
def worth(uses, last, now):
    """What rows are worth, by their uses and the step of the last one, both unsigned."""
    age = tl.maximum(now - (last.to(tl.int64) & 0xFFFFFFFF), 0).to(tl.float32)
    return (uses.to(tl.int64) & 0xFFFFFFFF).to(tl.float32) / (1.0 + age / _HALF_LIFE)


@triton.jit
def choose_places(
    listed,
    listed_tables,
    head,
    hand,
    chunks,
    places,
    owners,
    marks,
    counters,
    tally,
    host_addresses,
    device_addresses,
    STRIDE: tl.constexpr,
):
    """Find a device location for each listed row, and exchange addresses with the row that is there.

    A row of the next batch takes the place of any row that neither batch has, one of this batch only that of
    a row that is worth less. Each row looks at TRIES locations, spread over all, from the moving hand on.
    """
    count = tl.load(tally + LISTED)
    mark = tl.load(head + MARK).to(tl.int32)
    now = tl.load(head + NOW)
    size = tl.load(head + DEVICE_ROWS)
    apart = (size + TRIES - 1) // TRIES
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        lane = tl.arange(0, BLOCK)
        number = start + lane
        valid = number < count
        row = tl.load(listed + number, mask=valid, other=0)
        tag = tl.load(listed_tables + number, mask=valid, other=0)
        of_next = tag < 0
        uses = tl.load(field_pointer(chunks, row, COUNT, 0, STRIDE), mask=valid & ~of_next, other=0)
        limit = tl.where(of_next, float("inf"), worth(uses, now + tl.zeros_like(uses), now))
        open_ = valid
        won = valid & False
        place = tl.zeros_like(row)
        for _attempt in range(2):  # again where another program was faster
            if tl.max(open_.to(tl.int32), axis=0) > 0:
                least = tl.full(limit.shape, float("inf"), tl.float32)
                chosen = tl.full(row.shape, -1, tl.int32)
                first = tl.atomic_add(hand, tl.sum(open_.to(tl.int64), axis=0))
                first = first + tl.cumsum(open_.to(tl.int64), axis=0) - 1
                for k in range(TRIES):
                    at = ((first + k * apart) % size).to(tl.int32)
                    free = open_ & (at > 0) & (tl.load(marks + at, mask=open_, other=mark) != mark)
                    owner = tl.load(owners + at, mask=free, other=0)
                    birth = tl.load(field_pointer(chunks, owner, BIRTH, 0, STRIDE), mask=free, other=0)
                    used = tl.load(field_pointer(chunks, owner, COUNT, 0, STRIDE), mask=free, other=0)
                    last = tl.load(field_pointer(chunks, owner, LAST, 0, STRIDE), mask=free, other=0)
                    value = tl.where(birth < 0, -1.0, worth(used, last, now))
                    better = free & (value < least)
                    least = tl.where(better, value, least)
                    chosen = tl.where(better, at, chosen)
                wanted = open_ & (chosen >= 0) & (least < limit)
                old = tl.atomic_xchg(marks + chosen, tl.zeros_like(chosen) + mark, mask=wanted)
                mine = wanted & (old != mark)
                place = tl.where(mine, chosen, place)
                won = won | mine
                open_ = open_ & ~mine & (wanted | (chosen < 0))
        victim = tl.load(owners + place, mask=won, other=0)
        from_ = tl.load(chunks + row, mask=won, other=0)
        to = tl.load(chunks + victim, mask=won, other=0)
        tl.store(chunks + row, to, mask=won)
        tl.store(chunks + victim, from_, mask=won)
        tl.store(owners + place, row, mask=won)
        tl.store(places + victim, tl.full(row.shape, ON_HOST, tl.int32), mask=won)
        tl.store(places + row, tl.where(won, place, ON_HOST), mask=valid)
        total = tl.sum(won.to(tl.int32), axis=0)
        if total > 0:
            pair = tl.atomic_add(tally + PAIRS, total) + tl.cumsum(won.to(tl.int32), axis=0) - 1
            tl.store(host_addresses + pair, from_, mask=won)
            tl.store(device_addresses + pair, to, mask=won)
            table = tl.where(of_next, -1 - tag, tag)
            unit = tl.full(row.shape, 1, tl.int64)
            tl.atomic_add(counters + table * COUNTERS + TIER_EXCHANGES, unit, mask=won)


@triton.jit
def _words(address, column):
    """Pointers to the words of locations, which begin at multiples of 16 bytes."""
    pointer = address.to(tl.pointer_type(tl.int32)) + column
    return tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, pointer.shape[1]))


@triton.jit
def swap_rows(
    tally,
    host_addresses,
    device_addresses,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Exchange the WORDS words at each pair of addresses."""
    count = tl.load(tally + PAIRS)
    column = tl.arange(0, COLUMNS)[None, :]
    for start in range(tl.program_id(0) * GROUP, count, tl.num_programs(0) * GROUP):
        number = start + tl.arange(0, GROUP)
        valid = (number < count)[:, None]
        host = tl.load(host_addresses + number, mask=number < count, other=0)[:, None]
        device = tl.load(device_addresses + number, mask=number < count, other=0)[:, None]
        for first in range(0, WORDS, COLUMNS):
            mask = valid & (first + column < WORDS)
            words = _words(host + first * 4, column)
            right = _words(device + first * 4, column)
            comes = tl.load(words, mask=mask, other=0)
            goes = tl.load(right, mask=mask, other=0)
            tl.store(words, goes, mask=mask)
            tl.store(right, comes, mask=mask)


@triton.jit(do_not_specialize=["count"])
def count_places(index, count, places, present):
    """How many of the rows in an index's slots are on the device."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    words = index + number.to(tl.int64) * 16 + 8
    row = tl.load(words.to(tl.pointer_type(tl.int64)), mask=valid, other=0)
    place = tl.load(places + row, mask=valid & (row > 0), other=ON_HOST)
    tl.atomic_add(present, tl.sum((place >= 0).to(tl.int64), axis=0))
