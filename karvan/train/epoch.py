"""`Epoch`: the progress of training through its data, step by step.

A checkpoint has the position after the last batch that was trained on; prefetched batches do not count. Of
data without a position the trained batches of its epoch are skipped, in the order that the state of the
random generators at the start of the epoch gives.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from logging import getLogger
from typing import TYPE_CHECKING, Any

from karvan.argument_checks import check_integers
from karvan.data.loading.rank_shares import kind_of, mismatch
from karvan.errors import Training
from karvan.train.dataset import UnfinishedError
from karvan.train.feed import FedBatch, Feed, RankRounds, feed, merged_position, move_back, never, position_of
from karvan.train.results import TrainingCounts, gather_state, random_state, set_random_state
from karvan.train.types import Positioned, samples_of

if TYPE_CHECKING:
    from karvan.train.evaluation import ModelSetup


@dataclass(frozen=True)
class Accumulation:
    """The passes of a step on one of `world_size` ranks.

    gradient_accumulation_steps: the batches of every rank in a step. global_accumulation_steps: those of all
    ranks together; in step number s, rank r has one more than others if (r - s) modulo world_size is below
    the remainder, so that ranks read their data evenly. together: a step has the batches of all ranks.

    Gradients of ranks are averaged, dense and sparse. So that a step of W ranks equals the step of one
    process on all of their samples, the loss of a pass is divided by (samples of all ranks in the step) /
    (samples of the pass · W), which is exactly 1 for equal batches. Batches that make a fixed global step
    have equal weights, as in one process. In mode async every trainer makes its own steps, with the mean over
    its samples.
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
        even, rest = divmod(self.global_accumulation_steps, self.world_size)
        return even + ((self.rank - step) % self.world_size < rest)

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


_log = getLogger("karvan.train")


def starts_epoch(
    position: Any, data: Any, counts: TrainingCounts, drop_unfinished: bool, *, warns: bool
) -> bool:
    """Whether data was moved to the start of its epoch, because the position is of another kind of data.

    Both may read the same records, but the position of one means nothing to the other. At the end of an epoch
    no position is needed: the next epoch starts at its first batch, in the order that it has by its number.
    Within an epoch it is an error, unless what was trained of the epoch is to be dropped.
    """
    if position is None or not isinstance(data, Positioned):
        return False
    saved, current = kind_of(position), kind_of(position_of(data))
    if saved == current:
        return False
    if not drop_unfinished and (counts.batches or _grows(data)):
        raise UnfinishedError(f"Epoch {counts.epoch} cannot be continued. {mismatch(saved, current)}")
    if warns and counts.batches:
        _log.warning(
            "Epoch %d starts again at its first batch: %d of its batches are trained a second time.",
            counts.epoch,
            counts.batches,
        )
    counts.batches = 0
    start = getattr(data, "start_epoch", None)  # other data is at its start
    if start is not None:
        start(counts.epoch)
    return True


def _grows(data: Any) -> bool:
    """Whether an epoch starts where the one before ended, so that a position is always needed."""
    ask = getattr(data, "identity", None)
    identity = ask() if callable(ask) else None
    return identity is not None and identity.grows


class PositionError(ValueError):
    """Data cannot continue at the position of a checkpoint, because it has another order now."""


@dataclass
class Epoch:
    """The groups of batches that make the steps of an epoch.

    stopped: why to take no more batches, if so. due: whether it is time to save. ends: called with the reason
    why all ranks have stopped, or None; returns whether the epoch ends before its data does.
    """

    data: Iterable[Any]
    runs: ModelSetup
    passes: Accumulation
    counts: TrainingCounts
    stopped: Callable[[], object] = never
    due: Callable[[], bool] = never
    ends: Callable[[str | None], bool] = lambda reason: False

    def __post_init__(self) -> None:
        self.connection, self.placement = self.runs.connection, self.runs.placement
        self._position: Any = None  # of the data, after the last batch that was trained on
        self._skip = 0  # batches of the data that were trained on before
        self._epoch_random: Any = None  # what the data's order may depend on, if it has no position
        self._random_later: Any = None  # the generators' state once the data has been skipped forward
        self._feed: Feed | None = None
        self.complete = False  # whether the data has reached its end
        self.may_be_empty = False  # whether the data may have nothing new, as a topic without new messages
        self.empty = False  # whether it had nothing new

    def groups(self, begin: Callable[[], None] = lambda: None) -> Generator[list[FedBatch], None, None]:
        """The batches of each step until the end of the epoch; begin is called if it is a new one."""
        counts, any_group, passes = self.counts, False, self.passes.count
        self.complete = False
        if counts.batches == 0:
            begin()
            self._position = position_of(self.data)
            self._epoch_random = random_state() if self._position is None else None
        # Data that was moved to the end of an epoch has nothing more for that one, and then the next epoch.
        for _ in range(2 if isinstance(self.data, Positioned) else 1):
            with self.placement.checked_by(self.data), self._begin_feed() as batches:
                while rounds := list(islice(batches, passes)):
                    if self.ends(batches.reason):
                        break
                    if group := [fed for fed in rounds if fed.all_batches]:
                        if self._random_later is not None:
                            self._restore_random()
                        any_group = True
                        yield group
                    else:
                        counts.passed += 1
            self._restore_random()
            if self.ends(batches.reason):
                self.move_back()
                return
            if counts.batches or any_group:
                self.complete = True
                return
        if self.may_be_empty:
            self.empty = True
            return
        raise ValueError(
            f"Epoch {counts.epoch} must have at least one batch, but the data gave none. A generator, or "
            "anything else that can be iterated only once, lasts for one epoch."
        )

    def _begin_feed(self) -> Feed:
        self.placement.forget()  # what the feed before had prefetched
        passes, begin = self.passes, self.counts.step + self.counts.passed
        rounds = RankRounds(
            self.connection,
            "fit",
            lambda number: number % passes.count < passes.mine(begin + number // passes.count),
            self.due,
        )
        self._feed = feed(
            self.data,
            partial(self.placement.place, training=True),
            prefetch=self.runs.prefetch,
            skip=self._skip,
            stopped=self.stopped,
            rounds=rounds,
            within=self.placement.feed_context(),
        )
        self._skip = 0
        return self._feed

    def _restore_random(self) -> None:
        """Undo what the data drew while it was skipped forward."""
        if self._random_later is not None:
            set_random_state(self._random_later)
            self._random_later = None

    def samples(self, group: list[FedBatch]) -> int:
        """The samples of a step, of all ranks."""
        alone = self.connection.world_size == 1
        return sum(samples_of(fed.batch) if alone else fed.all_samples for fed in group)

    def trained(self, group: list[FedBatch], samples: int) -> None:
        """A step of these batches was made or skipped."""
        Training.started = True
        self.counts.step += 1
        self.counts.batches += len(group)
        self.counts.samples += samples
        self._position = group[-1].position

    def end_epoch(self) -> None:
        """Count the epoch: the next batch belongs to another one."""
        self.counts.epoch += 1
        self.counts.batches = 0
        self.complete = False

    def abandon(self, error: BaseException) -> None:
        """Close the feed at once after an error: its thread would wait for ranks that wait for this one."""
        if self._feed is not None:
            self._feed.abandon(error)

    def move_back(self) -> None:
        """Move the data to the position of training, if it has positions."""
        move_back(self.data, self._position)

    def state(self) -> dict[str, Any]:
        """The state for checkpoints, the same on all ranks; a collective."""
        positions = gather_state(self.connection.main, self._position)
        return {
            "position": merged_position(self.data, positions),
            "epoch_random": self._epoch_random,
        }

    def load_or_drop(self, saved: Mapping[str, Any], random: Any, drop: bool) -> None:
        """`load`; if drop and any rank's data has another order, start the epoch again. A collective."""
        begin, failure = position_of(self.data), None
        try:
            self.load(saved, random, drop)
        except PositionError as error:
            failure = error
        failures = [None if failure is None else str(failure)]
        if drop and self.connection.world_size > 1:
            failures = self.connection.main.gather_json(failures[0])
        if not any(failures):
            return
        if not drop:
            raise PositionError(
                f"{failure} Continue with the settings that the checkpoint's fit had, or start this epoch "
                "again in the new order with drop_unfinished=True (karvan train --drop-unfinished)."
            ) from failure
        reason = next(failure for failure in failures if failure)
        _log.warning("The epoch starts again, after %d batches of it: %s", self.counts.batches, reason)
        move_back(self.data, begin)
        self.counts.batches = 0
        self._position = self._epoch_random = self._random_later = None
        set_random_state(random)

    def load(self, saved: Mapping[str, Any], random: Any, drop_unfinished: bool = False) -> None:
        """Restore what `state` gave, with these random generators after the batches to skip.

        drop_unfinished: see `starts_epoch`.
        """
        self._position, self._epoch_random = saved["position"], saved["epoch_random"]
        warns = self.connection.rank == 0
        if starts_epoch(self._position, self.data, self.counts, drop_unfinished, warns=warns):
            self._position = position_of(self.data)
            set_random_state(random)
            return
        batches = self.counts.batches
        if self._position is not None and isinstance(self.data, Positioned):
            try:
                self.data.load_state_dict(self._position)
            except ValueError as error:
                raise PositionError(str(error)) from error
        elif batches and not (self.connection.world_size == 1 and len(saved["ranks"]) == 1):
            raise ValueError(
                "The epoch was started, and several ranks cannot skip its batches: expected data with "
                f"state_dict and load_state_dict, such as a Loader, got {type(self.data).__name__}."
            )
        else:
            self._skip = batches
        if batches:
            self._random_later = random
        set_random_state(self._epoch_random if batches and self._epoch_random else random)
