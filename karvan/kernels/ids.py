"""Ids on a GPU: hashes of strings, remainders, hash stacks and crosses."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.kernels.jit import Bytes, Ids, Integer, Kernel, Lanes, device_function, kernel, launch, tl

# Functions that kernels share: 64-bit words of strings at any address, and the bounds of rows.
#
# Strings begin at any address, but a GPU loads a word from addresses that divide by eight alone. So a word is
# put together from the two that it overlaps. Of these, a kernel loads only those with a byte of the string:
# they are in the same memory as this byte, since memory is allocated in multiples of eight bytes.


@device_function
def row_bounds(
    offsets: Ids, row: Lanes, inside: Lanes, total: Integer, width: Integer, ragged: tl.constexpr
) -> Lanes:
    """The start and the length of rows: by offsets, or all of one width.

    Offsets that are wrong never lead out of the values.
    """
    if ragged:
        start = tl.load(offsets + row, mask=inside, other=0)
        end = tl.load(offsets + row + 1, mask=inside, other=0)
        start = tl.minimum(tl.maximum(start, 0), total)
        length = tl.minimum(tl.maximum(end, start), total) - start
    else:
        start = tl.where(inside, row * width, 0)
        length = tl.where(inside, width.to(tl.int64), 0)
    return start, length


@device_function
def load_word(address: Lanes, mask: Lanes) -> Lanes:
    """The word at addresses that divide by eight."""
    return tl.load(address.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)


@device_function
def combined(low: Lanes, high: Lanes, shift: Lanes) -> Lanes:
    """The word that begins `shift` bits within the lower of two. Two shifts, since one by 64 is undefined."""
    return (low >> shift) | ((high << 1) << (63 - shift))


@device_function
def word_at(values: Bytes, at: Lanes, mask: Lanes) -> Lanes:
    """The eight bytes from each position on, as a little-endian number."""
    address = (values + at).to(tl.int64)
    skipped = address & 7
    low = load_word(address - skipped, mask)
    high = load_word(address - skipped + 8, mask & (skipped > 0))
    return combined(low, high, (skipped * 8).to(tl.uint64))


@device_function
def lower_bytes(word: Lanes, count: Lanes) -> Lanes:
    """A word with its lower `count` bytes alone, from 0 to 8."""
    bits = (count * 8).to(tl.uint64)
    remaining = (tl.full(bits.shape, 1, tl.uint64) << (bits & 63)) - 1
    return tl.where(bits < 64, word & remaining, word)


@device_function
def first_word(values: Bytes, at: Lanes, length: Lanes) -> Lanes:
    """The first eight bytes of strings, or fewer where these are shorter."""
    count = tl.minimum(length, 8)
    address = (values + at).to(tl.int64)
    skipped = address & 7
    low = load_word(address - skipped, count > 0)
    high = load_word(address - skipped + 8, skipped + count > 8)
    return lower_bytes(combined(low, high, (skipped * 8).to(tl.uint64)), count)


@device_function
def fold(x: Lanes) -> Lanes:
    """The step by which both hashes mix upper bits into lower ones."""
    return x ^ (x >> 47)


@device_function
def rotate(x: Lanes, by: tl.constexpr) -> Lanes:
    """Bits moved to the right, those that leave come back on the left."""
    return (x >> by) | (x << (64 - by))


@device_function
def as_id(hashes: Lanes, size: Integer) -> Lanes:
    """All 64 bits for size -1, without the sign bit for 0, else the remainder: `karvan.ids.bucket`."""
    result = hashes
    if size > 0:
        result = hashes % size.to(tl.uint64)
    if size == 0:
        result = hashes & 0x7FFFFFFFFFFFFFFF
    return result.to(tl.int64)


# MurmurHash64A with seed 0 of strings, one string a lane; see csrc/hash/murmur.cpp for the same on a CPU.


MULTIPLIER = tl.constexpr(0xC6A4A7935BD1E995)

_BLOCK = 128


@device_function
def absorb(hashes: Lanes, word: Lanes) -> Lanes:
    """The state after a whole word."""
    return (hashes ^ (fold(word * MULTIPLIER) * MULTIPLIER)) * MULTIPLIER


@device_function
def finish(hashes: Lanes) -> Lanes:
    """The hash after the last word."""
    return fold(fold(hashes) * MULTIPLIER)


@kernel
def murmur_kernel(
    values: Bytes,
    offsets: Ids,
    total: Integer,
    width: Integer,
    size: Integer,
    out: Ids,
    rows: Integer,
    ragged: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The ids of `block` strings a program."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = row < rows
    start, length = row_bounds(offsets, row, inside, total, width, ragged)
    hashes = length.to(tl.uint64) * MULTIPLIER
    address = (values + start).to(tl.int64)
    skipped = address & 7
    address = address - skipped
    shift = (skipped * 8).to(tl.uint64)
    # Each word of memory is loaded once: `low` is the one that the next word of the string begins in.
    low = load_word(address, length > 0)
    whole = length >> 3
    most = tl.max(whole, axis=0)
    index = most & 0
    while index < most:
        active = index < whole
        high = load_word(address + index * 8 + 8, index * 8 + 8 - skipped < length)
        hashes = tl.where(active, absorb(hashes, combined(low, high, shift)), hashes)
        low = tl.where(active, high, low)
        index += 1
    # A tail goes in as one zero-padded word without the inner scrambling of the whole words.
    rest = length & 7
    high = load_word(address + whole * 8 + 8, (rest > 0) & (skipped + rest > 8))
    tail = lower_bytes(combined(low, high, shift), rest)
    hashes = tl.where(rest > 0, (hashes ^ tail) * MULTIPLIER, hashes)
    tl.store(out + row, as_id(finish(hashes), size), mask=inside)


def murmur_rows(values: Tensor, offsets: Tensor | None, width: int = 1, size: int = -1) -> Tensor:
    """The ids of strings, for the same arguments as `farm_rows`."""
    return _hash_rows(murmur_kernel, values, offsets, width, size)


def _hash_rows(program: Kernel, values: Tensor, offsets: Tensor | None, width: int, size: int) -> Tensor:
    values = values.contiguous()
    rows = values.shape[0] // width if offsets is None else offsets.shape[0] - 1
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    bounds = out if offsets is None else offsets.contiguous()
    settings = (values.shape[0], width, size)
    launch(program, rows, _BLOCK, out, values, bounds, *settings, ragged=offsets is not None)
    return out


def murmur_words(words: Tensor) -> Tensor:
    """The hash of each row of a matrix of ids."""
    return murmur_rows(words.contiguous().view(torch.uint8).reshape(-1), None, 8 * words.shape[1])


# FarmHash Fingerprint64 of strings, one string a lane; see csrc/hash/farm.cpp for the same on a CPU.


_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_MASK = (1 << 64) - 1
_Y = (81 * _K1 + 113) & _MASK
_Z = (_Y * _K2 + 113) & _MASK

PRIME0 = tl.constexpr(_K0)
PRIME1 = tl.constexpr(_K1)
PRIME2 = tl.constexpr(_K2)
# The state of long strings before their first block, with a seed of 81.
START_X = tl.constexpr(81 * _K2 & _MASK)
START_Y = tl.constexpr(_Y)
START_Z = tl.constexpr((_Z ^ _Z >> 47) * _K2 & _MASK)


@device_function
def join(u: Lanes, v: Lanes, by: Lanes) -> Lanes:
    """Two words as one."""
    inner = fold((u ^ v) * by)
    return fold((v ^ inner) * by) * by


@device_function
def hash_to_16(first: Lanes, last: Lanes, size: Lanes) -> Lanes:
    """The hash of strings of at most 16 bytes, from their first eight bytes and their last eight."""
    by = PRIME2 + size * 2
    # Up to 3 bytes: the first, the middle one and the last.
    middle = (first >> (((size >> 1) * 8) & 63)) & 0xFF
    end = (first >> (((size - 1) * 8) & 63)) & 0xFF
    y = (first & 0xFF) + (middle << 8)
    tiny = fold((y * PRIME2) ^ ((size + (end << 2)) * PRIME0)) * PRIME2
    # From 4 to 7 bytes two words of 32 bits, from 8 on two of 64.
    a = first + PRIME2
    u = tl.where(size < 8, size + ((first & 0xFFFFFFFF) << 3), rotate(last, 37) * by + a)
    v = tl.where(size < 8, (first >> (((size - 4) * 8) & 63)) & 0xFFFFFFFF, (rotate(a, 25) + last) * by)
    return tl.where(size == 0, PRIME2, tl.where(size < 4, tiny, join(u, v, by)))


@device_function
def absorb32(w0: Lanes, w1: Lanes, w2: Lanes, w3: Lanes, a: Lanes, b: Lanes) -> Lanes:
    """Four words mixed into a pair."""
    start = a + w0
    total = start + w1 + w2
    return total + w3, rotate(b + start + w3, 21) + rotate(total, 44) + start


@device_function
def absorb64(
    values: Bytes,
    at: Lanes,
    mask: Lanes,
    x: Lanes,
    y: Lanes,
    z: Lanes,
    v0: Lanes,
    v1: Lanes,
    w0: Lanes,
    w1: Lanes,
    by: Lanes,
    scale: tl.constexpr,
) -> Lanes:
    """The state after a block of 64 bytes: x, y, z and two pairs."""
    address = (values + at).to(tl.int64)
    skipped = address & 7
    address = address - skipped
    shift = (skipped * 8).to(tl.uint64)
    a0 = load_word(address, mask)
    a1 = load_word(address + 8, mask)
    a2 = load_word(address + 16, mask)
    a3 = load_word(address + 24, mask)
    a4 = load_word(address + 32, mask)
    a5 = load_word(address + 40, mask)
    a6 = load_word(address + 48, mask)
    a7 = load_word(address + 56, mask)
    a8 = load_word(address + 64, mask & (skipped > 0))
    b0 = combined(a0, a1, shift)
    b1 = combined(a1, a2, shift)
    b2 = combined(a2, a3, shift)
    b3 = combined(a3, a4, shift)
    b4 = combined(a4, a5, shift)
    b5 = combined(a5, a6, shift)
    b6 = combined(a6, a7, shift)
    b7 = combined(a7, a8, shift)
    new_x = (rotate(x + y + v0 + b1, 37) * by) ^ (w1 * scale)
    new_y = rotate(y + v1 + b6, 42) * by + v0 * scale + b5
    new_z = rotate(z + w0, 33) * by
    new_v0, new_v1 = absorb32(b0, b1, b2, b3, v1 * by, new_x + w0)
    new_w0, new_w1 = absorb32(b4, b5, b6, b7, new_z + w1, new_y + b2)
    return new_z, new_y, new_x, new_v0, new_v1, new_w0, new_w1


@device_function
def hash_long(values: Bytes, start: Lanes, length: Lanes, first: Lanes) -> Lanes:
    """The hash of strings of more than 64 bytes; lanes with shorter ones are ignored."""
    long = length > 64
    zero = first & 0
    x = first + START_X
    y = zero + START_Y
    z = zero + START_Z
    v0 = zero
    v1 = zero
    w0 = zero
    w1 = zero
    by = zero + PRIME1
    # The last block ends where the string ends: it overlaps the one before unless the length divides by 64.
    blocks = tl.where(long, (length - 1) >> 6, 0)
    most = tl.max(blocks, axis=0)
    index = most & 0
    while index < most:  # triton's interpreter has no range of numbers that a kernel computes
        active = index < blocks
        at = start + index * 64
        nx, ny, nz, nv0, nv1, nw0, nw1 = absorb64(values, at, active, x, y, z, v0, v1, w0, w1, by, 1)
        x = tl.where(active, nx, x)
        y = tl.where(active, ny, y)
        z = tl.where(active, nz, z)
        v0 = tl.where(active, nv0, v0)
        v1 = tl.where(active, nv1, v1)
        w0 = tl.where(active, nw0, w0)
        w1 = tl.where(active, nw1, w1)
        index += 1
    by = ((z & 0xFF) << 1) + PRIME1
    w0 = w0 + ((length - 1) & 63).to(tl.uint64)
    v0 = v0 + w0
    w0 = w0 + v0
    at = start + length - 64
    x, y, z, v0, v1, w0, w1 = absorb64(values, at, long, x, y, z, v0, v1, w0, w1, by, 9)
    return join(join(v0, w0, by) + fold(y) * PRIME0 + z, join(v1, w1, by) + x, by)


@kernel
def farm_kernel(
    values: Bytes,
    offsets: Ids,
    total: Integer,
    width: Integer,
    size: Integer,
    out: Ids,
    rows: Integer,
    ragged: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The ids of `block` strings a program."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = row < rows
    start, length = row_bounds(offsets, row, inside, total, width, ragged)
    n = length.to(tl.uint64)
    end = start + length
    longest = tl.max(length, axis=0)
    first = first_word(values, start, length)
    last = word_at(values, end - 8, length >= 8)
    hashes = hash_to_16(first, last, n)
    if longest > 16:
        by = PRIME2 + n * 2
        more = length > 16
        a = first * tl.where(length > 32, PRIME2, PRIME1)
        b = word_at(values, start + 8, more)
        c = last * by
        y = rotate(a + b, 43) + rotate(c, 30) + word_at(values, end - 16, more) * PRIME2
        z = join(y, a + rotate(b + PRIME2, 18) + c, by)
        hashes = tl.where(more, z, hashes)
        if longest > 32:
            more = length > 32
            e = word_at(values, start + 16, more) * by
            f = word_at(values, start + 24, more)
            g = (y + word_at(values, end - 32, more)) * by
            h = (z + word_at(values, end - 24, more)) * by
            u = rotate(e + f, 43) + rotate(g, 30) + h
            hashes = tl.where(more, join(u, e + rotate(f + a, 18) + g, by), hashes)
        if longest > 64:
            hashes = tl.where(length > 64, hash_long(values, start, length, first), hashes)
    tl.store(out + row, as_id(hashes, size), mask=inside)


def farm_rows(values: Tensor, offsets: Tensor | None, width: int = 1, size: int = -1) -> Tensor:
    """The ids of strings: rows of bytes by int64 offsets, or all of one width.

    Size -1 means all 64 bits, 0 the lower 63, and a positive one buckets.
    """
    return _hash_rows(farm_kernel, values, offsets, width, size)


# Arithmetic of ids, which are unsigned 64-bit numbers in int64 tensors: remainders and hash stacks.

_IDS = 1024


@kernel
def remainder_kernel(ids: Ids, modulus: Integer, out: Ids, count: Integer, block: tl.constexpr) -> None:
    """The remainders of `block` ids a program."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    rest = tl.load(ids + at, mask=inside, other=0).to(tl.uint64) % modulus.to(tl.uint64)
    tl.store(out + at, rest.to(tl.int64), mask=inside)


@kernel
def each_remainder_kernel(
    ids: Ids, moduli: Ids, step: Integer, out: Ids, count: Integer, block: tl.constexpr
) -> None:
    """The same by moduli in memory: one for each id with step 1, one for all with step 0."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    modulus = tl.load(moduli + at * step, mask=inside, other=1).to(tl.uint64)
    rest = tl.load(ids + at, mask=inside, other=0).to(tl.uint64) % modulus
    tl.store(out + at, rest.to(tl.int64), mask=inside)


@kernel
def hash_stack_kernel(
    ids: Ids, rounds: Integer, size: Integer, out: Ids, count: Integer, block: tl.constexpr
) -> None:
    """The rows of `block` ids a program: the hash of the id, the hash of this hash, and so on."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    key = tl.load(ids + at, mask=inside, other=0).to(tl.uint64)
    eight = (key & 0) + 8
    buckets = size.to(tl.uint64)
    first = out + at * rounds
    turn = rounds.to(tl.int64) & 0
    while turn < rounds:
        key = hash_to_16(key, key, eight)
        tl.store(first + turn, (key % buckets).to(tl.int64) + turn * size, mask=inside)
        turn += 1


def remainders(ids: Tensor, modulus: int | Tensor) -> Tensor:
    """`karvan.ids.mod`."""
    if isinstance(modulus, int):
        ids = ids.contiguous()
        out = torch.empty_like(ids)
        launch(remainder_kernel, ids.numel(), _IDS, out, ids, modulus)
        return out
    shape = torch.broadcast_shapes(ids.shape, modulus.shape)  # type: ignore[no-untyped-call]
    ids = ids.expand(shape).contiguous()
    step = int(modulus.numel() != 1)
    moduli = modulus.expand(ids.shape).contiguous() if step else modulus
    out = torch.empty_like(ids)
    launch(each_remainder_kernel, ids.numel(), _IDS, out, ids, moduli, step)
    return out


def hash_stacks(ids: Tensor, rounds: int, size: int) -> Tensor:
    """`karvan.ids.hash_stack`."""
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, rounds), dtype=torch.int64, device=ids.device)
    launch(hash_stack_kernel, ids.numel(), 256, out, ids, rounds, size)
    return out


# Crosses: the MurmurHash of every combination of the ids that a row has in several columns.

_CROSSED = 256


@kernel
def cross_kernel(
    values: Ids,
    starts: Ids,
    lengths: Ids,
    steps: Ids,
    row: Ids,
    offsets: Ids,
    index: Ids,
    seed: Integer,
    out: Ids,
    count: Integer,
    first: tl.constexpr,
    last: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Take the ids of one column into the hashes of `block` combinations a program.

    Combination i of a row has the id i // steps % lengths of the column; `index` gets its position.
    """
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    mine = tl.load(row + at, mask=inside, other=0)
    number = at - tl.load(offsets + mine, mask=inside, other=0)
    step = tl.load(steps + mine, mask=inside, other=1)
    length = tl.load(lengths + mine, mask=inside, other=1)
    position = tl.load(starts + mine, mask=inside, other=0) + (number // step) % length
    tl.store(index + at, position, mask=inside)
    word = tl.load(values + position, mask=inside, other=0).to(tl.uint64)
    if first:
        state = (word & 0) + seed.to(tl.uint64)
    else:
        state = tl.load(out + at, mask=inside, other=0).to(tl.uint64)
    state = absorb(state, word)
    if last:
        state = finish(state)
    tl.store(out + at, state.to(tl.int64), mask=inside)


def combinations(
    columns: list[tuple[Tensor, Tensor, Tensor]], row: Tensor, offsets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The hash of each combination, and the index of its id in each column.

    A column has its ids, and for each row the start and the number of those; `row` and `offsets` are the row
    of each combination and the first combination of each row.
    """
    count = row.shape[0]
    hashes = torch.empty(count, dtype=torch.int64, device=row.device)
    seed = (8 * len(columns) * 0xC6A4A7935BD1E995) & ((1 << 64) - 1)
    steps = [torch.ones_like(offsets[:-1])]
    for _, _, lengths in reversed(columns[1:]):
        steps.insert(0, steps[0] * lengths)
    indices = []
    for number, ((values, starts, lengths), step) in enumerate(zip(columns, steps, strict=True)):
        index = torch.empty_like(row)
        arguments = (
            values.contiguous(),
            starts.contiguous(),
            lengths.contiguous(),
            step,
            row,
            offsets,
            index,
        )
        turn = {"first": number == 0, "last": number == len(columns) - 1}
        launch(cross_kernel, count, _CROSSED, hashes, *arguments, seed - (seed >> 63 << 64), **turn)
        indices.append(index)
    return hashes, indices
