"""`ordered_sum`: the sum of tensors of several ranks, with bits that do not depend on who has which.

Floating-point sums depend on their order. Here the order is that of the parts, however many ranks there are:
the tensors are cut into a chunk for each rank. A rank gets its chunk of every part, adds them up in order,
and sends the sum to all others. With one part on each rank these are as many bytes as a ring needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from karvan.distributed.collectives import CollectiveChannel


def ordered_sum(channel: CollectiveChannel, mine: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    """The sum of flat tensors of equal size: part i is one of those that rank ranks[i] has.

    mine: this rank's parts, in order. A collective; all ranks say the same `ranks`.
    """
    if len(mine) != ranks.count(channel.rank):
        raise ValueError(
            f"Expected {ranks.count(channel.rank)} parts of rank {channel.rank}, got {len(mine)}."
        )
    world, size = channel.world_size, len(mine[0]) if mine else 0
    if world == 1:
        return _added(mine)
    if not all(rank in ranks for rank in range(world)):
        size = int(channel.swap(torch.full((world, 1), size)).max())
    bounds = [size * rank // world for rank in range(world + 1)]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    chunk = sizes[channel.rank]
    send = [part[begin:end] for begin, end in pairwise(bounds) for part in mine]
    counts = [ranks.count(rank) for rank in range(world)]
    received = channel.exchange(
        torch.cat(send) if send else torch.empty(0),
        [len(mine) * each for each in sizes],
        [count * chunk for count in counts],
    )
    of_ranks = [
        list(torch.split(piece, chunk)) if chunk else []
        for piece in torch.split(received, [n * chunk for n in counts])
    ]
    ordered = [of_ranks[rank].pop(0) for rank in ranks] if chunk else []
    total = _added(ordered) if ordered else received.new_empty(0)
    return channel.exchange(total.repeat(world), [chunk] * world, sizes)


def _added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
