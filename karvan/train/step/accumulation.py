"""Gradient accumulation: how many batches make a step, and how much each loss counts.

Gradients of ranks are averaged, dense and sparse. So that a step of W ranks is the step of one process on
all of their rows, the loss of a pass is divided by (rows of all ranks in the step) / (rows of the pass · W),
which is exactly 1 for equal batches. Batches that make a fixed global step count the same, as they do in one
process. In mode async every trainer makes steps of its own, with the mean over its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from karvan.argument_checks import check_integers
from karvan.train.feed.batch_source import FedBatch


@dataclass(frozen=True)
class Accumulation:
    """The passes of a step on one of `world` ranks.

    accumulate: every rank has so many batches in a step. global_accumulate: all ranks together have; in step
    number s, rank r has one more than others if (r - s) modulo world is below what is left over, so that
    ranks read their data evenly. together: a step has the batches of all ranks.
    """

    accumulate: int = 1
    global_accumulate: int | None = None
    rank: int = 0
    world: int = 1
    together: bool = True

    def __post_init__(self) -> None:
        check_integers(accumulate=self.accumulate, global_accumulate=self.global_accumulate)
        if self.global_accumulate is None:
            return
        if not self.together:
            raise ValueError(
                "global_accumulate makes steps of all ranks together, but in mode async each makes its own: "
                "expected accumulate."
            )
        if self.accumulate != 1:
            raise ValueError(
                f"accumulate={self.accumulate} is for every rank and global_accumulate="
                f"{self.global_accumulate} for all together: expected one of them."
            )
        if self.global_accumulate < 1:
            raise ValueError(f"global_accumulate must be at least 1, got {self.global_accumulate}.")

    @property
    def count(self) -> int:
        """The passes of a step, the same on all ranks."""
        if self.global_accumulate is None:
            return self.accumulate
        return -(-self.global_accumulate // self.world)

    @property
    def batches(self) -> int:
        """Batches of all ranks that make a step."""
        return self.global_accumulate or self.accumulate * self.world

    def steps(self, batches: int) -> int:
        """How many steps so many batches of every rank make."""
        return -(-batches * self.world // self.batches)

    def mine(self, step: int) -> int:
        """The batches that this rank has in a step."""
        if self.global_accumulate is None:
            return self.accumulate
        even, left = divmod(self.global_accumulate, self.world)
        return even + ((self.rank - step) % self.world < left)

    def weights(self, group: Sequence[FedBatch]) -> tuple[list[float], float]:
        """How much each pass of this rank counts, an empty one 0, and what those of all ranks sum up to."""
        if self.world == 1:
            return [1.0] * len(group), float(len(group))
        if self.global_accumulate is not None:
            return [float(fed.rows > 0) for fed in group], float(sum(fed.all_batches for fed in group))
        return [float(fed.rows) for fed in group], float(sum(fed.all_rows for fed in group))

    def divisor(self, weight: float, weights: Sequence[float], whole: float) -> float:
        """What the loss of a pass is divided by; 1 for an empty one, whose loss is 0."""
        if not weight:
            return 1.0
        return whole / (weight * self.world) if self.together else sum(weights) / weight
