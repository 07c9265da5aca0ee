"""Which batches the next step has, and which of them this trainer computes.

There are two ways. `LeasedSteps`: every trainer has the next batch that it has leased, so a step has as many
batches as there are trainers. `PlannedSteps` (`global_batches`): a step has the next G batches of the epoch,
and they are dealt out, so that results do not depend on how many trainers there are.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from typing_extensions import override

from karvan.activity import activity
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.leased_data import LeasedBatches, LeasedData
from karvan.data.leasing.record_search import blaming
from karvan.data.leasing.task_records import TakenRecords, records_done
from karvan.distributed.elastic import ElasticGroup
from karvan.train.trainer_parts import TrainerParts
from karvan.train.types import samples_of

# `LeasedFeed`: takes leased batches in the background while the current one computes.
#
# Unlike the feed of ranks with fixed shares it agrees with nobody: who has a batch takes part in the next
# step with it, who has none takes part without. A trainer waits for a batch that is being read, but not for
# records that others may still be working on.
#
# An error of the data is raised as a `BatchError`, which has the records of which one may have caused it.


_WAKE = 0.02  # seconds between two looks at whether there is no task for now


class TakenBatch(NamedTuple):
    """A batch that is ready, and the records of leased tasks in it."""

    batch: Any
    records: list[TakenRecords]
    samples: int

    @property
    def done(self) -> dict[int, int]:
        """How many records of each task are done with it, by token."""
        return records_done(self.records)


class LeasedFeed:
    """The batches that this trainer leases in one epoch, until `close`."""

    def __init__(self, loader: LeasedBatches, place: Callable[[Any], Any], prefetch: int) -> None:
        self._loader = loader
        self._place = place
        self._size = max(1, prefetch)
        self._changed = threading.Condition()
        self._ready: deque[TakenBatch] = deque()
        self._error: BaseException | None = None
        self._placing = False  # whether a batch is on its way
        self._closed = False
        self._complete = False
        self._thread = threading.Thread(target=self._fill, name="karvan-leased-feed", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether all records of the epoch are done, by whomever."""
        return self._complete and not self._ready

    def take(self, stopped: Callable[[], object]) -> TakenBatch | None:
        """The next batch; None if there is none for now, if the epoch is over, or if `stopped` says so."""
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                idle = self._loader.idle and not self._placing
                if self._complete or self._closed or stopped() or idle:
                    return None
                self._changed.wait(_WAKE)
            taken = self._ready.popleft()
            self._changed.notify_all()
        activity.advance()
        return taken

    def close(self) -> None:
        """End the thread; the leases of batches that were not taken stay with the client."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._loader.stop()
        self._thread.join()
        self._ready.clear()

    def _fill(self) -> None:
        """The thread: takes a batch whenever there is room."""
        batches = iter(self._loader)
        try:
            while True:
                with blaming(self._loader.suspects):
                    batch = next(batches, None)
                if batch is None:
                    return
                self._placing = True
                records = self._loader.hand_over()
                with blaming(records):
                    made = TakenBatch(self._place(batch), records, samples_of(batch))
                with self._changed:
                    self._ready.append(made)
                    self._placing = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._ready) < self._size or self._closed)
                    if self._closed:
                        return
        except BaseException as error:
            if not self._closed:
                self._error = error
        finally:
            with self._changed:
                self._complete = self._error is None
                self._changed.notify_all()


@dataclass(frozen=True)
class WorkSettings:
    """How the records of a job are trained: as its job.yaml says.

    of_step: how many batches a step has, whoever computes them; None: as many as there are trainers.
    """

    of_step: int | None = None
    most_tries: int = 3
    skip_bad_records: int = 0


@dataclass(frozen=True)
class LeasedFit:
    """A fit on leased data. stopped: why to take no more batches, if so."""

    parts: TrainerParts
    group: ElasticGroup
    data: LeasedData
    client: WorkClient
    work: WorkSettings
    stopped: Callable[[], object]


class StepPlan(NamedTuple):
    """The batches of a step, in order: who computes each, and a number by which its trainer knows it."""

    ranks: list[int]
    numbers: list[int]

    def mine(self, rank: int) -> list[tuple[int, int]]:
        """Place and number of each batch of a rank."""
        return [
            (place, number)
            for place, (owner, number) in enumerate(zip(self.ranks, self.numbers, strict=True))
            if owner == rank
        ]


class BatchDealer(ABC):
    """The batches of the steps of a fit, from a feed for each epoch."""

    def __init__(self, fit: LeasedFit) -> None:
        runs = fit.parts.setup.runs
        self._data = fit.data
        self._group = fit.group
        self._counts = fit.parts.counts
        self._place = partial(runs.placement.place, training=True)
        self._prefetch = runs.prefetch
        self._feed: LeasedFeed | None = None
        self._epoch = -1

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether all records of the epoch are done."""

    @abstractmethod
    def plan(self) -> StepPlan:
        """The batches of the next step."""

    @abstractmethod
    def take(self, number: int, stopped: Callable[[], object]) -> TakenBatch | None:
        """One of this trainer's batches; None if it has none for now."""

    @abstractmethod
    def regrouped(self) -> None:
        """Another round of trainers has begun."""

    def close(self) -> None:
        """End the threads."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _open(self, first: int = 0) -> LeasedFeed:
        """The feed of the epoch; a new one begins with the batch `first`."""
        if self._feed is None or self._epoch != self._counts.epoch:
            self.close()
            self._epoch = self._counts.epoch
            self._feed = LeasedFeed(self._loader(first), self._place, self._prefetch)
        return self._feed

    @abstractmethod
    def _loader(self, first: int) -> LeasedBatches:
        """The records of the epoch that this trainer reads."""


class LeasedSteps(BatchDealer):
    """A batch of each trainer, of records that it leases."""

    def __init__(self, fit: LeasedFit) -> None:
        super().__init__(fit)
        self._client = fit.client

    @property
    @override
    def ended(self) -> bool:
        return self._open().ended

    @override
    def plan(self) -> StepPlan:
        """A trainer that has no batch has one without samples."""
        world = self._group.world_size
        return StepPlan(list(range(world)), [0] * world)

    @override
    def take(self, number: int, stopped: Callable[[], object]) -> TakenBatch | None:
        return None if stopped() else self._open().take(stopped)

    @override
    def regrouped(self) -> None:
        """Leases stay."""

    @override
    def _loader(self, first: int) -> LeasedBatches:
        return self._data.lease(self._client, self._epoch)


class PlannedSteps(BatchDealer):
    """The next `of_step` batches of the epoch, dealt out to the trainers of the round."""

    def __init__(self, fit: LeasedFit, of_step: int) -> None:
        super().__init__(fit)
        self._plan = self._data.plan()
        self._of_step = of_step

    @property
    @override
    def ended(self) -> bool:
        return self._counts.batches >= len(self._plan)

    @override
    def plan(self) -> StepPlan:
        first = self._counts.batches
        numbers = list(range(first, min(first + self._of_step, len(self._plan))))
        world = self._group.world_size
        return StepPlan([number % self._of_step % world for number in numbers], numbers)

    @override
    def take(self, number: int, stopped: Callable[[], object]) -> TakenBatch | None:
        """It waits for the batch, whatever `stopped` says: the step needs it."""
        feed = self._open(number)
        while (taken := feed.take(lambda: False)) is not None:
            if number in taken.done:
                return taken
        raise RuntimeError(f"Expected batch {number} of epoch {self._epoch}, but the data has ended.")

    @override
    def regrouped(self) -> None:
        """The batches are dealt out anew."""
        self.close()

    @override
    def _loader(self, first: int) -> LeasedBatches:
        return self._data.planned(
            self._plan,
            epoch=self._epoch,
            first=first,
            rank=self._group.rank,
            ranks=self._group.world_size,
            of_step=self._of_step,
        )
