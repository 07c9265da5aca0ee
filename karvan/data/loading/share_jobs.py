"""From the pieces of a rank's share to jobs for threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np

from karvan.data.loading.rank_shares import Piece, count
from karvan.data.loading.read_jobs import Order, ReadJob
from karvan.data.loading.shuffle import Block, ShufflePlan
from karvan.data.source import Split


def jobs_of(plan: ShufflePlan, epoch: int, pieces: Sequence[Piece]) -> Iterator[ReadJob]:
    """The jobs that hand out these pieces of an epoch, in order. Pieces of one block are read together."""
    blocks = plan.blocks(epoch)
    end = count(pieces)
    for number, group in groupby(pieces, key=itemgetter(0)):
        block, ranges = blocks[number], list(group)
        if plan.shuffle:
            records = count(ranges)
            end -= records
            order = partial(_order, plan, epoch, block, ranges)
            yield ReadJob(epoch, block.splits, records, order, last=not end)
            continue
        (split,) = block.splits  # of data that is not shuffled, a part of a block can be read by itself
        for _, first, stop in ranges:
            end -= stop - first
            part = Split(split.path, split.first + first, stop - first)
            yield ReadJob(epoch, (part,), part.count, last=not end)


def _order(plan: ShufflePlan, epoch: int, block: Block, ranges: Sequence[Piece]) -> Order:
    order = plan.order(epoch, block)
    return np.concatenate([order[first:end] for _, first, end in ranges])
