"""`FitSteps`: the records that a trainer of an elastic job leases for a fit, and the steps that train them.

It has the position of the data in checkpoints, what is done about a batch that raises an error, and what is
left to do when a trainer leaves or ends.

Which batches the next step has, and which of them this trainer computes, is decided in two ways.
`LeasedBatchPlan`: every trainer has the next batch that it has leased, so a step has as many batches as there
are trainers. `FixedBatchPlan` (`global_batches`): a step has the next G batches of the epoch, and they are
dealt out, so that results do not depend on how many trainers there are.

An error of the data is raised as a `BatchError`, which has the records of which one may have caused it.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from typing_extensions import override

from karvan.data.leased_data import LeasedBatches, LeasedData
from karvan.data.task_records import BatchError, SearchResult, named_error, report
from karvan.data.work_client import WorkClient
from karvan.distributed import CollectiveChannel
from karvan.distributed.elastic import ElasticGroup
from karvan.distributed.parameter_servers import StepCommits
from karvan.ragged import Batch
from karvan.train.assembly import TrainerParts
from karvan.train.evaluation import evaluating
from karvan.train.feed import FedBatch, LeasedFeed, never
from karvan.train.losses import check_of
from karvan.train.optimizer_step import engines_of
from karvan.train.results import same_random_state_afterwards
from karvan.train.step_routine import StepBatches

T = TypeVar("T")


class WorkSettings(NamedTuple):
    """How the records of a job are trained: as its job.yaml says.

    of_step: how many batches a step has, whoever computes them; None: as many as there are trainers.
    """

    of_step: int | None = None
    most_tries: int = 3
    skip_bad_records: int = 0


class LeasedFit(NamedTuple):
    """A fit on leased data."""

    trainer: TrainerParts
    group: ElasticGroup
    data: LeasedData
    client: WorkClient
    work: WorkSettings


class StepPlan(NamedTuple):
    """The batches of a step, in order: who computes each, and a number by which its trainer knows it."""

    ranks: list[int]
    numbers: list[int]

    def mine(self, rank: int) -> list[tuple[int, int]]:
        """Place and number of each batch of a rank."""
        owned = enumerate(zip(self.ranks, self.numbers, strict=True))
        return [(place, number) for place, (owner, number) in owned if owner == rank]


class LeasedBatchPlan:
    """The batches of steps: one of each trainer, of records that it leases; `FixedBatchPlan` derives."""

    def __init__(self, fit: LeasedFit) -> None:
        self._fit = fit
        self._counts = fit.trainer.counts
        self._feed: LeasedFeed | None = None
        self._epoch = -1

    @property
    def ended(self) -> bool:
        """Whether all records of the epoch are done."""
        return self._open().ended

    def next_step(self) -> StepPlan:
        """The batches of the next step. A trainer that has none has one without samples."""
        world = self._fit.group.world_size
        return StepPlan(list(range(world)), [0] * world)

    def take(self, number: int, stopped: Callable[[], object]) -> FedBatch | None:
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
            runs = self._fit.trainer.setup.runs
            place = partial(runs.placement.place, training=True)
            self._feed = LeasedFeed(self._loader(first), place, runs.prefetch)
        return self._feed

    def _loader(self, first: int) -> LeasedBatches:
        return self._fit.data.lease(self._fit.client, self._epoch)


class FixedBatchPlan(LeasedBatchPlan):
    """The next `of_step` batches of the epoch, dealt out to the trainers of the round."""

    def __init__(self, fit: LeasedFit, of_step: int) -> None:
        super().__init__(fit)
        self._plan = self._fit.data.plan()
        self._of_step = of_step

    @property
    @override
    def ended(self) -> bool:
        return self._counts.batches >= len(self._plan)

    @override
    def next_step(self) -> StepPlan:
        first = self._counts.batches
        numbers = list(range(first, min(first + self._of_step, len(self._plan))))
        world = self._fit.group.world_size
        return StepPlan([number % self._of_step % world for number in numbers], numbers)

    @override
    def take(self, number: int, stopped: Callable[[], object]) -> FedBatch | None:
        """It waits for the batch, whatever `stopped` says: the step needs it."""
        feed = self._open(number)
        while (batch := feed.take(never)) is not None:
            if number in batch.done:
                return batch
        raise RuntimeError(f"Expected batch {number} of epoch {self._epoch}, but the data has ended.")

    @override
    def regrouped(self) -> None:
        """The batches are dealt out anew."""
        self.close()

    @override
    def _loader(self, first: int) -> LeasedBatches:
        group = self._fit.group
        dealt = {"rank": group.rank, "ranks": group.world_size, "of_step": self._of_step}
        return self._fit.data.planned(self._plan, epoch=self._epoch, first=first, **dealt)


class Acknowledgements:
    """The records of steps that are committed and may not be acknowledged yet.

    All trainers know the records of every step, and the first one of the round reports them. Until the master
    has confirmed them, the others remember them, too: whoever becomes the first reports what the one before
    may not have reported. Numbers of records only grow, so a report may come twice.
    """

    def __init__(self, client: WorkClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._steps: dict[int, dict[int, int]] = {}  # records by token, by step
        self._error: BaseException | None = None
        self._reports = False
        self._busy = False
        self._closed = False
        self.confirmed = (
            0  # the last step whose records the master knows, as far as this trainer reports them
        )
        self._thread = threading.Thread(target=self._run, name="karvan-acknowledge", daemon=True)
        self._thread.start()

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
                self.confirmed = max(steps)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._busy = False
                self._changed.notify_all()


_HINT = ". Correct it, or set skip_bad_records in job.yaml, so that such records are skipped."


class BadRecords:
    """The batches of one fit that raise errors.

    It finds the record that raises it, and tells the master, which has the task tried again, skips the
    record, or fails the job. The trainer continues with other batches.

    The search computes the forward and the loss of parts of the batch, without gradients. It changes neither
    buffers nor random generators, counts nothing in metrics, and creates no rows: keys that tables do not
    have are zeros in it. The batch itself was looked up before it raised, as any other: rows of its keys may
    exist since, and stay as they were initialized until a batch trains them.
    """

    def __init__(self, trainer: TrainerParts, data: LeasedData) -> None:
        self._trainer = trainer
        self._data = data
        self._check_labels = check_of(trainer.loss)
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
            lambda: evaluating(
                self._trainer.model
            ),  # some modules need more than one sample while they train
        ]
        with same_random_state_afterwards(), _same_buffers_afterwards(self._trainer.model):
            bad = self._data.search().find(failed.records, [self._check_in(mode) for mode in modes])
        self._trainer.setup.runs.placement.forget()
        if bad.every and not self.computed:
            raise error from error.__cause__
        return bad

    def _check_in(self, mode: Callable[[], AbstractContextManager[None]]) -> Callable[[Batch], None]:
        trainer, runs = self._trainer, self._trainer.setup.runs

        def check(batch: Batch) -> None:
            placed = runs.placement.place(batch)
            self._check_labels(placed)
            runs.placement.receive(placed)
            with mode(), torch.no_grad():
                trainer.loss(runs.infer(placed), placed)

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


# What trainers of a round say to each other about a step, or when they meet.


@dataclass(frozen=True)
class StepBatch:
    """One of the batches of a step, for JSON; place: its number among them."""

    place: int
    samples: int = 0
    records: dict[str, int] = field(default_factory=dict)  # how many are done, by token of the lease
    losses: dict[str, float] = field(default_factory=dict)
    finite: bool = True
    pushes: list[list[int]] = field(default_factory=list)  # of rows' gradients, staged: member and number
    tables: list[str] = field(default_factory=list)  # which have gradients


@dataclass(frozen=True)
class Contribution:
    """What a trainer says about a step, for JSON."""

    member: int
    batches: list[dict[str, Any]] = field(default_factory=list)  # each a `StepBatch`
    ended: bool = False  # whether all records of the epoch are done
    stop: str | None = None
    save: bool = False
    regroup: bool = False
    leaves: bool = False
    confirmed: int = 0  # the last step whose records the master knows


@dataclass(frozen=True)
class Agreement:
    """What all trainers of a round have said about a step."""

    step: int
    contributions: tuple[Contribution, ...]

    @property
    def batches(self) -> list[StepBatch]:
        """The batches of the step that have samples, in their order."""
        batches = [
            StepBatch(**batch) for contribution in self.contributions for batch in contribution.batches
        ]
        return sorted((batch for batch in batches if batch.samples), key=lambda batch: batch.place)

    @property
    def samples(self) -> int:
        """Those of all batches."""
        return sum(batch.samples for batch in self.batches)

    @property
    def taken(self) -> bool:
        """Whether all gradients are finite; otherwise the step is skipped."""
        return all(batch.finite for batch in self.batches)

    @property
    def ended(self) -> bool:
        """Whether the epoch is over."""
        return all(contribution.ended for contribution in self.contributions)

    @property
    def stop(self) -> str | None:
        """Why training stops, if it does."""
        return next((contribution.stop for contribution in self.contributions if contribution.stop), None)

    @property
    def records(self) -> dict[int, int]:
        """How many records are done, by token."""
        return {int(token): done for batch in self.batches for token, done in batch.records.items()}

    @property
    def losses(self) -> dict[str, float]:
        """The means over all samples."""
        sums: dict[str, float] = {}
        for batch in self.batches:
            for name, loss in batch.losses.items():
                sums[name] = sums.get(name, 0.0) + loss * batch.samples
        return {name: total / self.samples for name, total in sums.items()}

    def row_scale(self, grad_reduce: str) -> float:
        """The factor of rows' gradients, which are sums over samples.

        Servers add them up, or take the mean over the batches that have a key ("key"). "mean" divides by all
        samples; otherwise a batch has the gradient of its mean loss, as a rank of a fixed number has it.
        """
        return (1 if grad_reduce == "mean" else len(self.batches)) / self.samples

    @classmethod
    def gather(cls, channel: CollectiveChannel, step: int, contribution: Contribution) -> Agreement:
        """What all trainers say, with this contribution of this one; a collective."""
        answers = channel.gather_json(asdict(contribution))
        return cls.from_json({"step": step, "contributions": answers})

    def as_json(self) -> dict[str, Any]:
        """For other trainers, which may have missed it."""
        return {
            "step": self.step,
            "contributions": [asdict(contribution) for contribution in self.contributions],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Agreement:
        """What `as_json` gave."""
        return cls(
            value["step"], tuple(Contribution(**contribution) for contribution in value["contributions"])
        )


class FitSteps(ABC):
    """How trainers of a group make steps of their records: together (`GroupSteps`), or alone (`OwnSteps`)."""

    def __init__(self, fit: LeasedFit) -> None:
        self._trainer = fit.trainer
        self._group = fit.group
        self._client = fit.client
        self._of_step = fit.work.of_step
        self._connection = fit.trainer.connection
        servers = self._connection.servers
        commits = None if servers is None else servers.commits
        self._commits = commits if isinstance(commits, StepCommits) else None
        self._engines = engines_of(fit.trainer.model)
        self._batches = (
            LeasedBatchPlan(fit) if fit.work.of_step is None else FixedBatchPlan(fit, fit.work.of_step)
        )
        self._closed = False
        self.seed = torch.initial_seed()  # of the generators of batches, where steps have fixed batches
        self.bad = BadRecords(fit.trainer, fit.data)
        self.records = Acknowledgements(fit.client)

    @property
    def ended(self) -> bool:
        """Whether all records of the epoch are done, by whomever."""
        return self._batches.ended

    @abstractmethod
    def agree(self, *, save: bool) -> dict[str, Any]:
        """Make a step or meet; a collective. save: this trainer says that a checkpoint is due."""

    @abstractmethod
    def missed(self) -> dict[str, Any] | None:
        """What `agree` gave to trainers that are gone, and to no other."""

    @abstractmethod
    def regrouped(self) -> None:
        """Another round has begun."""

    def settle(self) -> None:
        """What trainers that are gone have done is known: report it, and drop what they have not; rank 0."""
        self.records.flush()
        self.abandon()
        self._group.settle()

    def abandon(self) -> None:
        """Servers and embedding workers drop what trainers that are gone have staged and looked up."""
        gone = self._gone()
        if self._commits is not None:
            for member in gone:
                self._commits.abandon(member)
        self._connection.abandon(gone)

    def _gone(self) -> list[int]:
        """All trainers that are not in the round any more, as far as this one has heard of them."""
        return sorted(self._group.gone)

    def _contribution(self, **said: Any) -> Contribution:
        stop = self._trainer.stop_request.reason
        return Contribution(
            member=self._group.member,
            ended=self.ended,
            stop=None if stop == "terminate" else stop,
            leaves=stop == "terminate",
            **said,
        )

    # Batches

    def _train_batch(self, number: int, train: Callable[[FedBatch], T]) -> T | None:
        """Take one of this trainer's batches and train it; None if there is none for now.

        A batch that raises an error is none: its bad record is reported, and all that is leased and not
        trained returns to the master.
        """
        request = self._trainer.stop_request
        try:
            batch = self._batches.take(number, lambda: request.reason)
            return None if batch is None else train(batch)
        except BatchError as failed:
            self._set_aside(failed)
            return None

    def _begin_batch(self, batch: FedBatch) -> StepBatches:
        """Gradients from now on are those of a batch, which is computed alone."""
        for engine in self._engines:
            engine.step = self._trainer.counts.step  # that of all trainers
        return self._trainer.setup.routine.begin([batch])

    def _set_aside(self, failed: BatchError) -> None:
        """Report a batch that raised an error, and return all records that are not trained."""
        self._trainer.setup.update.forget()
        self._close_batches()
        bad, error = self.bad.find(failed), failed.__cause__
        assert error is not None
        if self._of_step is not None:  # every step has fixed batches, so none can be left out
            raise named_error(error, failed.records, bad.record) from error
        self.records.flush()  # what is returned must not have been trained
        report(self._client, error, failed.records, bad.record, _HINT)
        self._client.give_back_all()

    def _close_batches(self) -> None:
        self._batches.close()
        self._trainer.setup.runs.placement.forget()

    # The position of the data, and the end

    def position(self) -> dict[str, Any]:
        """What a checkpoint has of the data's position."""
        self.records.flush()  # the position has the records of this step
        ledger = None if self._of_step is not None else self._client.take_position()
        return {"global_batches": self._of_step, "seed": self.seed, "ledger": ledger}

    def restore(self, position: Mapping[str, Any] | None) -> None:
        """Return to the position of a checkpoint; None: to the beginning of an epoch."""
        batches = self._trainer.counts.batches
        if batches and (position is None or position["global_batches"] != self._of_step):
            raise ValueError(
                "The checkpoint is in the middle of an epoch, and its records were divided in another "
                f"way: expected sharding: dynamic and global_batches: {self._of_step or 'none'}, got "
                f"{'sharding: static' if position is None else position['global_batches'] or 'none'}. "
                "Finish the epoch with the settings it began with."
            )
        if position is not None:
            self.seed = position["seed"]
        ledger = None if position is None or self._of_step is not None else position["ledger"]
        self._client.restore_position(ledger)

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
