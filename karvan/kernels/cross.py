"""Crosses: the MurmurHash of every combination of the ids that a row has in several columns."""

from __future__ import annotations

import torch
from torch import Tensor

from karvan.kernels.hashing import absorb, finish
from karvan.kernels.jit import Ids, Integer, kernel, launch, tl

_BLOCK = 256


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
        launch(cross_kernel, count, _BLOCK, hashes, *arguments, seed - (seed >> 63 << 64), **turn)
        indices.append(index)
    return hashes, indices
