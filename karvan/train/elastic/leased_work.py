"""`LeasedWork`: the records of a fit at the master, as one of its trainers sees them.

It has the position of the data in checkpoints, what is done about a batch that raises an error, and what is
left to do when a trainer leaves or ends. `FitSteps` are the steps that train these records.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from typing_extensions import override

from karvan.activity import activity
from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.dataset import named_error, report
from karvan.data.leasing.leased_data import LeasedBatches, LeasedData
from karvan.data.leasing.record_search import BatchError, SearchResult, blaming
from karvan.data.leasing.task_records import TakenRecords, records_done
from karvan.distributed.elastic import ElasticGroup
from karvan.ragged import Batch
from karvan.train.evaluation import evaluating
from karvan.train.feed import FedBatch
from karvan.train.losses import check_of
from karvan.train.results import same_random_state_afterwards
from karvan.train.step.optimizer_step import engines_of
from karvan.train.step.step_routine import StepBatches
from karvan.train.trainer_parts import TrainerParts
from karvan.train.types import samples_of

# Which batches the next step has, and which of them this trainer computes.
#
# There are two ways. `LeasedSteps`: every trainer has the next batch that it has leased, so a step has as
# many batches as there are trainers. `PlannedSteps` (`global_batches`): a step has the next G batches of the
# epoch, and they are dealt out, so that results do not depend on how many trainers there are.


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
            batch = self._ready.popleft()
            self._changed.notify_all()
        activity.advance()
        return batch

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
                    taken_batch = TakenBatch(self._place(batch), records, samples_of(batch))
                with self._changed:
                    self._ready.append(taken_batch)
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


class LeasedSteps:
    """The batches of steps: one of each trainer, of records that it leases; `PlannedSteps` derives."""

    def __init__(self, fit: LeasedFit) -> None:
        runs = fit.parts.setup.runs
        self._data = fit.data
        self._client = fit.client
        self._group = fit.group
        self._counts = fit.parts.counts
        self._place = partial(runs.placement.place, training=True)
        self._prefetch = runs.prefetch
        self._feed: LeasedFeed | None = None
        self._epoch = -1

    @property
    def ended(self) -> bool:
        """Whether all records of the epoch are done."""
        return self._open().ended

    def plan(self) -> StepPlan:
        """The batches of the next step. A trainer that has none has one without samples."""
        world = self._group.world_size
        return StepPlan(list(range(world)), [0] * world)

    def take(self, number: int, stopped: Callable[[], object]) -> TakenBatch | None:
        """One of this trainer's batches; None if it has none for now."""
        return None if stopped() else self._open().take(stopped)

    def regrouped(self) -> None:
        """Another round of trainers has begun; leases stay."""

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

    def _loader(self, first: int) -> LeasedBatches:
        return self._data.lease(self._client, self._epoch)


class PlannedSteps(LeasedSteps):
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
        while (batch := feed.take(lambda: False)) is not None:
            if number in batch.done:
                return batch
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


T = TypeVar("T")

# `Acknowledgements`: tells the master which records committed steps contain, behind the steps.
#
# All trainers know the records of every step, and the first one of the round reports them. Until the master
# has confirmed them, the others remember them, too: whoever becomes the first reports what the one before
# may not have reported. Numbers of records only grow, so a report may come twice.


class Acknowledgements:
    """The records of steps that are committed and may not be acknowledged yet."""

    def __init__(self, client: WorkClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._steps: dict[int, dict[int, int]] = {}  # records by token, by step
        self._error: BaseException | None = None
        self._reports = False
        self._busy = False
        self._closed = False
        self._confirmed = 0
        self._thread = threading.Thread(target=self._run, name="karvan-acknowledge", daemon=True)
        self._thread.start()

    @property
    def confirmed(self) -> int:
        """The last step whose records the master knows, as far as this trainer has reported them."""
        return self._confirmed

    def add(self, step: int, records: Mapping[int, int], *, report: bool) -> None:
        """A step is committed. report: whether it is this trainer that reports."""
        with self._changed:
            self._raise()
            self._steps[step] = dict(records)
            self._reports = report
            self._changed.notify_all()

    def forget(self, step: int) -> None:
        """The master knows the records of all steps up to this one."""
        with self._changed:
            self._steps = {number: records for number, records in self._steps.items() if number > step}

    def flush(self) -> None:
        """Report everything now; returns when the master has confirmed it."""
        with self._changed:
            self._reports = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not (self._steps or self._busy))
            self._raise()

    def close(self) -> None:
        """End the thread, without reporting any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or (self._steps and self._reports))
                    if self._closed:
                        return
                    steps, self._steps = self._steps, {}
                    self._busy = True
                done: dict[int, int] = {}
                for step in sorted(steps):
                    done |= steps[step]
                self._client.acknowledge(done)
                self._confirmed = max(steps)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._busy = False
                self._changed.notify_all()


# `BadRecords`: what a trainer of an elastic job does about a batch that raises an error.
#
# It finds the record that raises it, and tells the master, which has the task tried again, skips the record,
# or fails the job. The trainer continues with other batches.
#
# The search computes the forward and the loss of parts of the batch, without gradients. It changes neither
# buffers nor random generators, counts nothing in metrics, and creates no rows: keys that tables do not have
# are zeros in it. The batch itself was looked up before it raised, as any other: rows of its keys may exist
# since, and stay as they were initialized until a batch trains them.


_HINT = ". Correct it, or set skip_bad_records in job.yaml, so that such records are skipped."


class BadRecords:
    """The batches of one fit that raise errors."""

    def __init__(self, parts: TrainerParts, data: LeasedData) -> None:
        self._parts = parts
        self._data = data
        self._check_labels = check_of(parts.loss)
        self.computed = False  # whether a batch of this trainer has raised nothing

    def find(self, failed: BatchError) -> SearchResult:
        """The record that raises the error of a batch.

        If all records raise one, and no batch of this trainer was better, the program is wrong: its own error
        is raised.
        """
        error = failed.__cause__
        assert error is not None
        modes: list[Callable[[], AbstractContextManager[None]]] = [
            nullcontext,  # the mode in which it has raised
            lambda: evaluating(self._parts.model),  # some modules need more than one sample while they train
        ]
        with same_random_state_afterwards(), _same_buffers_afterwards(self._parts.model):
            bad = self._data.search().find(failed.records, [self._check_in(mode) for mode in modes])
        self._parts.setup.runs.placement.forget()
        if bad.every and not self.computed:
            raise error from error.__cause__
        return bad

    def _check_in(self, mode: Callable[[], AbstractContextManager[None]]) -> Callable[[Batch], None]:
        parts, runs = self._parts, self._parts.setup.runs

        def check(batch: Batch) -> None:
            placed = runs.placement.place(batch)
            self._check_labels(placed)
            runs.placement.receive(placed)
            with mode(), torch.no_grad():
                parts.loss(runs.infer(placed), placed)

        return check


@contextmanager
def _same_buffers_afterwards(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model, whether they were written to or replaced."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                buffer.copy_(values)
                setattr(module, name, buffer)


class LeasedWork:
    """The work of one fit."""

    def __init__(
        self,
        parts: TrainerParts,
        data: LeasedData,
        client: WorkClient,
        batches: LeasedSteps,
        work: WorkSettings,
    ) -> None:
        self._parts = parts
        self._client = client
        self._batches = batches
        self._of_step = work.of_step
        self.seed = torch.initial_seed()  # of the generators of batches, where steps have fixed batches
        self.bad = BadRecords(parts, data)
        self.records = Acknowledgements(client)
        self._closed = False

    def set_aside(self, failed: BatchError) -> None:
        """Report a batch that raised an error, and return all records that are not trained."""
        self._parts.setup.update.forget()
        self._close_batches()
        bad, error = self.bad.find(failed), failed.__cause__
        assert error is not None
        if self._of_step is not None:  # every step has fixed batches, so none can be left out
            raise named_error(error, failed.records, bad.record) from error
        self.records.flush()  # what is returned must not have been trained
        report(self._client, error, failed.records, bad.record, _HINT)
        self._client.give_back_all()

    def position(self) -> dict[str, Any]:
        """What a checkpoint has of the data's position."""
        self.records.flush()  # the position has the records of this step
        ledger = None if self._of_step is not None else self._client.take_position()
        return {"global_batches": self._of_step, "seed": self.seed, "ledger": ledger}

    def export(self) -> AbstractContextManager[None]:
        """While this trainer makes the final checkpoint, which is a task of the job like others."""
        self._close_batches()
        return self._client.export()

    def bad_records(self) -> int:
        """How many records the job has skipped."""
        if self._of_step is not None:
            return 0
        skipped: int = json.loads(self._client.take_position())["position"]["bad_records"]
        return skipped

    def restore(self, position: Mapping[str, Any] | None) -> None:
        """Return to the position of a checkpoint; None: to the beginning of an epoch."""
        batches = self._parts.counts.batches
        if batches and (position is None or position["global_batches"] != self._of_step):
            raise ValueError(
                "The checkpoint is in the middle of an epoch, and its records were divided in another "
                f"way: expected sharding: dynamic and global_batches: {self._of_step or 'none'}, got "
                f"{'sharding: static' if position is None else position['global_batches'] or 'none'}. "
                "Finish the epoch with the settings it began with."
            )
        if position is not None:
            self.seed = position["seed"]
        ledger: str | None = None
        if self._of_step is None:
            ledger = None if position is None else position["ledger"]
        self._client.restore_position(ledger)

    def acknowledge(self, done: Mapping[int, int]) -> None:
        """Report records that a trainer which is gone has trained; after the fit the master knows them."""
        if not self._closed:
            self._client.acknowledge(done)

    def leave(self) -> None:
        """Return the records that were leased and not trained: the others continue without this trainer."""
        self._close_batches()
        self.records.flush()  # all that may not be reported: what is returned must not have been trained
        self._client.close()

    def close(self) -> None:
        """End the threads, and disconnect. Leases stay until the others have settled what was trained."""
        self._closed = True
        self._close_batches()
        self.records.close()
        self._client.disconnect()

    def _close_batches(self) -> None:
        self._batches.close()
        self._parts.setup.runs.placement.forget()


class FitSteps(ABC):
    """How trainers of a group make steps: together (`GroupSteps`), or each on its own (`OwnSteps`)."""

    def __init__(self, fit: LeasedFit) -> None:
        parts, work = fit.parts, fit.work
        self._parts = parts
        self._group = fit.group
        self._stopped = fit.stopped
        self._engines = engines_of(parts.model)
        self._batches = LeasedSteps(fit) if work.of_step is None else PlannedSteps(fit, work.of_step)
        self.work = LeasedWork(parts, fit.data, fit.client, self._batches, work)

    @abstractmethod
    def agree(self, *, save: bool) -> dict[str, Any]:
        """Make a step or meet; a collective. save: this trainer says that a checkpoint is due."""

    @abstractmethod
    def missed(self) -> dict[str, Any] | None:
        """What `agree` gave to trainers that are gone, and to no other."""

    @abstractmethod
    def regrouped(self) -> None:
        """Another round has begun."""

    @abstractmethod
    def settle(self) -> None:
        """It is settled what trainers that are gone have done; rank 0."""

    def _train_batch(self, number: int, train: Callable[[TakenBatch], T]) -> T | None:
        """Take one of this trainer's batches and train it; None if there is none for now.

        A batch that raises an error is none: its bad record is reported, and all that is leased and not
        trained returns to the master.
        """
        try:
            batch = self._batches.take(number, self._stopped)
            return None if batch is None else train(batch)
        except BatchError as failed:
            self.work.set_aside(failed)
            return None

    def _begin_batch(self, batch: TakenBatch) -> StepBatches:
        """Gradients from now on are those of a batch, which is computed alone."""
        for engine in self._engines:
            engine.step = self._parts.counts.step  # that of all trainers
        return self._parts.setup.routine.begin([FedBatch(batch.batch, None, batch.samples, batch.samples)])
