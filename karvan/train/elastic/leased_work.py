"""`LeasedWork`: the records of a fit at the master, as one of its trainers sees them.

It has the position of the data in checkpoints, what is done about a batch that raises an error, and what is
left to do when a trainer leaves or ends. `FitSteps` are the steps that train these records.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.dataset import named_error, report
from karvan.data.leasing.leased_data import LeasedData
from karvan.data.leasing.record_search import BatchError, SearchResult
from karvan.ragged import Batch
from karvan.train.checks.label_values import check_of
from karvan.train.elastic.step_batches import (
    BatchDealer,
    LeasedFit,
    LeasedSteps,
    PlannedSteps,
    TakenBatch,
    WorkSettings,
)
from karvan.train.evaluation import evaluating
from karvan.train.feed.batch_source import FedBatch
from karvan.train.state.randomness import same_random_state_afterwards
from karvan.train.step.optimizer_step import engines_of
from karvan.train.step.step_routine import StepBatches
from karvan.train.trainer_parts import TrainerParts

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
            self._steps = {each: records for each, records in self._steps.items() if each > step}

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
                    taken, self._steps = self._steps, {}
                    self._busy = True
                done: dict[int, int] = {}
                for step in sorted(taken):
                    done |= taken[step]
                self._client.acknowledge(done)
                self._confirmed = max(taken)
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
            found = self._data.search().find(failed.records, [self._check_in(mode) for mode in modes])
        self._parts.setup.runs.placement.forget()
        if found.every and not self.computed:
            raise error from error.__cause__
        return found

    def report(self, client: WorkClient, failed: BatchError, found: SearchResult) -> None:
        """Tell the master, after the records of all committed steps were acknowledged."""
        error = failed.__cause__
        assert error is not None
        report(client, error, failed.records, found.record, _HINT)

    def fatal(self, failed: BatchError, found: SearchResult) -> Exception:
        """The error that ends a job whose batches cannot do without the record."""
        error = failed.__cause__
        assert error is not None
        return named_error(error, failed.records, found.record)

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
        batches: BatchDealer,
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
        found = self.bad.find(failed)
        if self._of_step is not None:  # every step has fixed batches, so none can be left out
            raise self.bad.fatal(failed, found) from failed.__cause__
        self.records.flush()  # what is returned must not have been trained
        self.bad.report(self._client, failed, found)
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
        self._batches: BatchDealer = (
            LeasedSteps(fit) if work.of_step is None else PlannedSteps(fit, work.of_step)
        )
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
            taken = self._batches.take(number, self._stopped)
            return None if taken is None else train(taken)
        except BatchError as failed:
            self.work.set_aside(failed)
            return None

    def _begin_batch(self, taken: TakenBatch) -> StepBatches:
        """Gradients from now on are those of a batch, which is computed alone."""
        for engine in self._engines:
            engine.step = self._parts.counts.step  # that of all trainers
        return self._parts.setup.routine.begin([FedBatch(taken.batch, None, taken.samples, taken.samples)])
