"""Functions that kernels share: 64-bit words of strings at any address, and the bounds of rows.

Strings begin at any address, but a GPU loads a word from addresses that divide by eight alone. So a word is
put together from the two that it overlaps. Of these, a kernel loads only those with a byte of the string:
they are in the same memory as this byte, since memory is allocated in multiples of eight bytes.
"""

from __future__ import annotations

from karvan.kernels.jit import Bytes, Ids, Integer, Lanes, device_function, tl


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
    kept = (tl.full(bits.shape, 1, tl.uint64) << (bits & 63)) - 1
    return tl.where(bits < 64, word & kept, word)


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
