"""MurmurHash64A with seed 0 of strings, one string a lane; see csrc/hash/murmur.cpp for the same on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.kernels.jit import Bytes, Ids, Integer, Lanes, device_function, kernel, launch, tl
from karvan.kernels.words import as_id, combined, fold, load_word, lower_bytes, row_bounds

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
    left = length & 7
    high = load_word(address + whole * 8 + 8, (left > 0) & (skipped + left > 8))
    tail = lower_bytes(combined(low, high, shift), left)
    hashes = tl.where(left > 0, (hashes ^ tail) * MULTIPLIER, hashes)
    tl.store(out + row, as_id(finish(hashes), size), mask=inside)


def murmur_rows(values: Tensor, offsets: Tensor | None, width: int = 1, size: int = -1) -> Tensor:
    """The ids of strings, for the same arguments as `farm_rows`."""
    values = values.contiguous()
    rows = values.shape[0] // width if offsets is None else offsets.shape[0] - 1
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    bounds = out if offsets is None else offsets.contiguous()
    settings = (values.shape[0], width, size)
    launch(murmur_kernel, rows, _BLOCK, out, values, bounds, *settings, ragged=offsets is not None)
    return out


def murmur_words(words: Tensor) -> Tensor:
    """The hash of each row of a matrix of ids."""
    return murmur_rows(words.contiguous().view(torch.uint8).reshape(-1), None, 8 * words.shape[1])
