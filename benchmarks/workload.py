"""The workloads of the sparse step, as plain ids: each candidate turns them into what its API takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from common import Zipf


@dataclass(frozen=True)
class Shape:
    """How large a workload is; every feature has its own table."""

    features: int
    table_rows: int
    batch: int
    dim: int
    lengths: tuple[int, int] = (1, 1)  # ids of one sample and feature: at least, at most
    pooled: bool = True

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return self.features * self.table_rows

    @property
    def single(self) -> bool:
        """Whether every sample has exactly one id per feature."""
        return self.lengths == (1, 1)


@dataclass(frozen=True)
class Ids:
    """One batch: ids, offsets and output gradient of each feature."""

    values: list[np.ndarray]
    offsets: list[np.ndarray]
    gradients: list[torch.Tensor]

    @property
    def count(self) -> int:
        """Ids in the batch."""
        return sum(len(values) for values in self.values)

    def unique(self) -> int:
        """Rows the batch touches."""
        return sum(len(np.unique(values)) for values in self.values)


def make_batches(shape: Shape, count: int, seed: int = 0) -> list[Ids]:
    """Return batches of Zipf(1.05) ids with random lengths and random gradients."""
    rng = np.random.default_rng(seed)
    zipf = Zipf(shape.table_rows, seed=seed)
    noise = torch.randn(
        shape.batch * shape.lengths[1], shape.dim, generator=torch.Generator().manual_seed(seed)
    )
    batches = []
    for _ in range(count):
        lengths = [
            rng.integers(*shape.lengths, size=shape.batch, endpoint=True) for _ in range(shape.features)
        ]
        offsets = [np.concatenate([[0], np.cumsum(each)]) for each in lengths]
        values = [zipf.sample(int(each[-1])) for each in offsets]
        sizes = [shape.batch if shape.pooled else len(each) for each in values]
        batches.append(Ids(values, offsets, [noise[:size] for size in sizes]))
    return batches
