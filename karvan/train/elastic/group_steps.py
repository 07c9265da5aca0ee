"""`GroupSteps`: the steps that a trainer makes together with those of its round.

It takes this trainer's batches, computes their gradients once, however often trainers have to agree anew, and
reports the records of committed steps to the master.

A batch that raises an error is no batch of the step: its bad record is reported (`leased_work.py`), all that
is leased and not trained returns to the master, and the trainer takes part in the step without a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from karvan.data.leasing.record_search import blaming
from karvan.dense.tensors import all_finite
from karvan.distributed import CollectiveChannel
from karvan.distributed.elastic import ElasticGroup, ordered_sum
from karvan.distributed.parameter_servers import Servers
from karvan.distributed.step_commits import StagedPart, StepCommits
from karvan.metrics.base import Metric
from karvan.train.elastic.leased_work import FitSteps, LeasedFit, StepPlan, TakenBatch
from karvan.train.results import gather_state, require_merge, seed_random
from karvan.train.step.data_parallel import flat_gradients, set_gradients
from karvan.train.step.optimizer_step import OptimizerStep
from karvan.train.types import MetricLike

# `JointStep`: one step of all trainers of a round, which happens on all of them or on none.
#
#     1. Each trainer prepares: it computes the gradients of its batches, sends those of rows to the servers,
#        which stage them, and takes part in the sum of the dense ones. It has changed nothing.
#     2. When its own part is complete everywhere, it says so to all others, together with what the step has
#        of it (`Contribution`). A trainer that has heard it from all has *committed* the step: it applies the
#        sum, and the servers apply what they have staged.
#
# If a trainer dies, the others compare. A step that one of them, or a server, has committed was prepared by
# all, so the others commit it, too. A step that nobody has committed is made again, by those who are left:
# their gradients are the same, only the sum is another.
#
# Gradients are sums over samples until the step is committed. Then they are divided by the number of samples
# of all batches, whoever has computed them. They are added in the order of the batches' places in the step.


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


class JointStep:
    """Makes the steps of a Trainer's optimizers together with the other trainers of a round."""

    def __init__(self, group: ElasticGroup, update: OptimizerStep, servers: Servers | None) -> None:
        self._group = group
        self._update = update
        self._parameters = [parameter for parameter in update.parameters() if parameter.requires_grad]
        self._mine: dict[int, Tensor] = {}  # the gradients of this trainer's batches, by number
        self._total: Tensor | None = None  # the sum over all trainers, once it is known
        commits = None if servers is None else servers.commits
        self._commits = commits if isinstance(commits, StepCommits) else None
        self._reduce: str = "mean" if servers is None else servers.hello["grad_reduce"]
        self._staged: dict[int, list[StagedPart]] = {}  # rows' gradients of this trainer's batches
        self._step = 0

    def begin(self, step: int) -> None:
        """Gradients from now on are of this step."""
        self._step = step
        if self._commits is not None:
            self._commits.begin_step(step)

    def add(self, number: int, batch: StepBatch) -> StepBatch:
        """Take the gradients that were computed for a batch of the step, and say in it what they are.

        They are sums over samples. A batch without samples has none.
        """
        finite = self._update.unscale()
        tables: list[str] = []
        if finite and batch.samples and self._commits is not None:
            before = len(self._commits.staged(self._step))
            tables = self._update.stage_rows()
            self._staged[number] = self._commits.staged(self._step)[before:]
        self._mine[number] = flat = flat_gradients(self._parameters)
        self._update.forget()
        pushes = [list(push.part) for push in self._staged.get(number, ())]
        finite = finite and all_finite([flat])
        return replace(batch, finite=finite, pushes=pushes, tables=tables)

    def keep(self, numbers: Sequence[int]) -> None:
        """Forget all other batches: other trainers compute them now."""
        self._mine = {number: flat for number, flat in self._mine.items() if number in numbers}
        for number in [staged for staged in self._staged if staged not in numbers]:
            for staged in self._staged.pop(number):
                staged.release()

    def agree(self, step: int, contribution: Contribution, plan: StepPlan) -> Agreement:
        """Commit the step with all others; a RankError if one is lost, after which it may be called again."""
        channel = self._group.channel
        mine = [self._mine[number] for _, number in plan.mine(channel.rank)]
        self._total = ordered_sum(channel, mine, plan.ranks) if plan.ranks else None
        for staged in self._staged.values():
            for push in staged:
                push.wait()
        answers = channel.gather_json(asdict(contribution))
        return Agreement(step, tuple(Contribution(**answer) for answer in answers))

    def apply(self, agreement: Agreement) -> bool:
        """Apply a step that is committed; whether it was taken, not skipped."""
        applied = agreement.taken
        if agreement.samples:
            assert self._total is not None
            self._commit(agreement, applied)  # servers apply it while this trainer makes the dense step
            if applied:
                set_gradients(self._parameters, self._total / agreement.samples)
                self._update.count_tables({table for batch in agreement.batches for table in batch.tables})
            self._update.finish(applied)
        self._mine, self._total, self._staged = {}, None, {}
        return applied

    def _commit(self, agreement: Agreement, applied: bool) -> None:
        if self._commits is None:
            return
        pushes = [(member, number) for batch in agreement.batches for member, number in batch.pushes]
        scale = agreement.row_scale(self._reduce)
        self._commits.commit(agreement.step, pushes if applied else [], scale, agreement.as_json())
        self._commits.send()

    def missed(self, step: int, lost: Iterable[int]) -> dict[str, Any] | None:
        """What a server says of this step, if it was committed by a trainer that is gone.

        One that is only silent, and wakes, cannot commit it any more.
        """
        if self._commits is None:
            return None
        self._commits.flush()
        for member in sorted(lost):
            self._commits.fence(member)
        newest = [progress for progress in self._commits.progress() if progress.committed == step]
        return dict(newest[0].ack) if newest else None

    def abandon(self, members: Iterable[int]) -> None:
        """Servers drop what members that are gone have staged and looked up, and refuse their calls."""
        if self._commits is not None:
            for member in sorted(members):
                self._commits.abandon(member)


# `SharedMetrics`: the training metrics of all trainers of a round, which each of them has complete.
#
# Before a step is committed, every trainer gets what metrics need of the others' batches: scores, labels,
# weights and groups. When it is committed, each counts all of them, in the order of the batches. So metrics
# are the same on all trainers, no sample is lost with a trainer, and the number of trainers does not change
# them.


class SharedMetrics:
    """Counts the batches of committed steps in metrics; by name."""

    def __init__(self, metrics: Mapping[str, MetricLike]) -> None:
        self._metrics = dict(metrics)
        for metric in self._metrics.values():
            require_merge(metric)
        self._mine: dict[int, dict[str, Any]] = {}  # of this trainer's batches, by number
        self._step: list[dict[str, Any]] = []  # of all batches of the step, in their order

    def read(self, number: int, output: Any, batch: Any) -> None:
        """Take what metrics need of one of this trainer's batches, and of the model's output for it."""
        tensors: dict[tuple[Any, ...], Tensor] = {}  # several metrics may need the same
        uses: dict[str, dict[str, int]] = {}
        for name, metric in self._metrics.items():
            uses[name] = {}
            for role, tensor in _taken(metric, output, batch).items():
                key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
                tensors.setdefault(key, tensor)
                uses[name][role] = list(tensors).index(key)
        # On the CPU, and not in memory that a later batch may use.
        copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors.values()]
        self._mine[number] = {"tensors": copies, "uses": uses}

    def share(self, channel: CollectiveChannel, mine: Sequence[tuple[int, int]]) -> None:
        """Exchange what was read with all trainers; a collective. mine: places and numbers of own batches."""
        if not self._metrics:
            return
        readings = [[place, self._mine[number]] for place, number in mine if number in self._mine]
        everything = [reading for reading in gather_state(channel, readings) for reading in reading]
        self._step = [read for _, read in sorted(everything, key=lambda reading: int(reading[0]))]

    def count(self) -> None:
        """Count the batches of the step, which is committed."""
        for read in self._step:
            for name, metric in self._metrics.items():
                _add(metric, {role: read["tensors"][index] for role, index in read["uses"][name].items()})
        self.forget()

    def forget(self) -> None:
        """Forget the batches of the step."""
        self._mine, self._step = {}, []


def _selects(metric: MetricLike) -> bool:
    """Whether `update` of the metric is that of its base, which tells what it needs."""
    return isinstance(metric, Metric) and type(metric).update is Metric.update


def _taken(metric: MetricLike, output: Any, batch: Any) -> Mapping[str, Tensor]:
    """What the metric needs of a batch: tensors, or its state after this batch alone."""
    if isinstance(metric, Metric) and _selects(metric):
        return metric.select(output, batch)
    alone = copy.deepcopy(metric)
    alone.reset()
    alone.update(output, batch)
    return alone.state()


def _add(metric: MetricLike, values: Mapping[str, Tensor]) -> None:
    """Count what `_taken` gave."""
    if isinstance(metric, Metric) and _selects(metric):
        metric.add_selection(values)
    else:
        require_merge(metric)(values)


class GroupSteps(FitSteps):
    """The steps of one fit that trainers make together."""

    def __init__(self, fit: LeasedFit) -> None:
        super().__init__(fit)
        self._of_step = fit.work.of_step
        self._joint = JointStep(fit.group, fit.parts.setup.update, fit.parts.connection.servers)
        self._metrics = SharedMetrics(fit.parts.metrics)
        self._computed: dict[int, StepBatch] = {}  # batches of the step in progress, by number

    def agree(self, *, save: bool) -> dict[str, Any]:
        """Make the next step with all others, except for its effects; a collective. Gives an `Agreement`.

        save: whether this trainer says that a checkpoint is due.
        """
        step = self._parts.counts.step + 1
        self._joint.begin(step)
        plan = self._batches.plan()
        mine = plan.mine(self._group.rank)
        numbers = [number for _, number in mine]
        self._computed = {number: done for number, done in self._computed.items() if number in numbers}
        self._joint.keep(numbers)  # others compute the rest now
        for number in numbers:
            if number not in self._computed:
                batch = self._train_batch(number, partial(self._gradients, number))
                self._computed[number] = self._joint.add(number, batch or StepBatch(0))
        self._metrics.share(self._group.channel, mine)
        stop = self._parts.stop_request.reason
        contribution = Contribution(
            member=self._group.member,
            batches=[asdict(replace(self._computed[number], place=place)) for place, number in mine],
            ended=self._batches.ended,
            stop=None if stop == "terminate" else stop,
            save=save,
            regroup=self._group.rank == 0 and self._group.regroup_wanted,
            leaves=stop == "terminate",
            confirmed=self.work.records.confirmed,
        )
        return self._joint.agree(step, contribution, plan).as_json()

    def apply(self, result: Mapping[str, Any]) -> tuple[Agreement, bool]:
        """The effects of a step that is committed: what was agreed on, and whether it was taken."""
        agreement = Agreement.from_json(result)
        applied = self._joint.apply(agreement)
        if agreement.samples:
            self._metrics.count()
        else:
            self._metrics.forget()
        self._computed = {}
        if self._of_step is not None:
            seed_random(self.work.seed, -1, self._parts.counts.step)
        elif agreement.samples:
            self.work.records.add(agreement.step, agreement.records, report=self._group.rank == 0)
        if self._group.rank != 0:
            self.work.records.forget(max(contribution.confirmed for contribution in agreement.contributions))
        return agreement, applied

    def missed(self) -> dict[str, Any] | None:
        """The agreement of a step that servers have committed, and no trainer that is left."""
        return self._joint.missed(self._parts.counts.step + 1, self._group.gone)

    def regrouped(self) -> None:
        """Another round has begun."""
        self._batches.regrouped()

    def settle(self) -> None:
        """What trainers that are gone have done is known: report it, and drop what they have not; rank 0."""
        self.work.records.flush()
        self._joint.abandon(self._group.gone)
        self._parts.connection.abandon(self._group.gone)
        self._group.settle()

    def _gradients(self, number: int, batch: TakenBatch) -> StepBatch:
        """Compute the gradients of a batch."""
        parts, samples = self._parts, batch.samples
        with blaming(batch.records):
            step = self._begin_batch(batch)
            if self._of_step is not None:  # generators belong to the batch, not to the trainer
                seed_random(self.work.seed, parts.counts.epoch, number)
            read = partial(self._metrics.read, number)
            losses = parts.setup.routine.gradients(step, parts.loss, parts.metrics, read, 1.0 / samples)
            self.work.bad.computed = True
            done = {} if self._of_step is not None else batch.done
            return StepBatch(
                place=0,
                samples=samples,
                records={str(token): count for token, count in done.items()},
                losses={name: float(loss) for name, loss in losses.means().items()},
            )
