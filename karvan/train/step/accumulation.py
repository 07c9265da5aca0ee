"""Gradient accumulation: how many batches make a step, and how much each loss counts.

Gradients of ranks are averaged, dense and sparse. So that a step of W ranks equals the step of one process on
all of their samples, the loss of a pass is divided by (samples of all ranks in the step) / (samples of the
pass · W), which is exactly 1 for equal batches. Batches that make a fixed global step have equal weights, as
in one process. In mode async every trainer makes its own steps, with the mean over its own samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from karvan.argument_checks import check_integers

if TYPE_CHECKING:
    from karvan.train.feed.rank_rounds import FedBatch


@dataclass(frozen=True)
class Accumulation:
    """The passes of a step on one of `world_size` ranks.

    gradient_accumulation_steps: the batches of every rank in a step. global_accumulation_steps: those of all
    ranks together; in step number s, rank r has one more than others if (r - s) modulo world_size is below
    the remainder, so that ranks read their data evenly. together: a step has the batches of all ranks.
    """

    gradient_accumulation_steps: int = 1
    global_accumulation_steps: int | None = None
    rank: int = 0
    world_size: int = 1
    together: bool = True

    def __post_init__(self) -> None:
        check_integers(
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            global_accumulation_steps=self.global_accumulation_steps,
        )
        if self.global_accumulation_steps is None:
            return
        if not self.together:
            raise ValueError(
                "global_accumulation_steps makes steps of all ranks together, but in mode async each makes "
                "its own: expected gradient_accumulation_steps."
            )
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} is for every rank and "
                f"global_accumulation_steps={self.global_accumulation_steps} for all together: "
                "expected one of them."
            )
        if self.global_accumulation_steps < 1:
            raise ValueError(
                f"global_accumulation_steps must be at least 1, got {self.global_accumulation_steps}."
            )

    @property
    def count(self) -> int:
        """The passes of a step, the same on all ranks."""
        if self.global_accumulation_steps is None:
            return self.gradient_accumulation_steps
        return -(-self.global_accumulation_steps // self.world_size)

    @property
    def batches(self) -> int:
        """Batches of all ranks that make a step."""
        return self.global_accumulation_steps or self.gradient_accumulation_steps * self.world_size

    def steps(self, batches: int) -> int:
        """How many steps this number of batches of every rank makes."""
        return -(-batches * self.world_size // self.batches)

    def mine(self, step: int) -> int:
        """The batches that this rank has in a step."""
        if self.global_accumulation_steps is None:
            return self.gradient_accumulation_steps
        even, left = divmod(self.global_accumulation_steps, self.world_size)
        return even + ((self.rank - step) % self.world_size < left)

    def weights(self, group: Sequence[FedBatch]) -> tuple[list[float], float]:
        """The weight of each pass of this rank, 0 for an empty one, and the sum over all ranks."""
        if self.world_size == 1:
            return [1.0] * len(group), float(len(group))
        if self.global_accumulation_steps is not None:
            return [float(fed.samples > 0) for fed in group], float(sum(fed.all_batches for fed in group))
        return [float(fed.samples) for fed in group], float(sum(fed.all_samples for fed in group))

    def divisor(self, weight: float, weights: Sequence[float], total_weight: float) -> float:
        """The number by which the loss of a pass is divided; 1 for an empty one, whose loss is 0."""
        if not weight:
            return 1.0
        return total_weight / (weight * self.world_size) if self.together else sum(weights) / weight
