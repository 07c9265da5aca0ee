"""`GroupSteps`: the steps that a trainer makes together with those of its round.

It takes this trainer's batches, computes their gradients once, however often trainers have to agree anew, and
reports the records of committed steps to the master.

A batch that raises an error is no batch of the step: its bad record is reported (`leased_work.py`), all that
is leased and not trained returns to the master, and the trainer takes part in the step without a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from karvan.data.leasing.record_search import blaming
from karvan.distributed import CollectiveChannel
from karvan.metrics.base import Metric
from karvan.train.elastic.joint_step import Agreement, Contribution, JointStep, StepBatch
from karvan.train.elastic.leased_work import FitSteps
from karvan.train.elastic.step_batches import LeasedFit, TakenBatch
from karvan.train.state.gathering import gather_state, require_merge
from karvan.train.state.randomness import seed_random
from karvan.train.types import MetricLike

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
        self._mine[number] = {"tensors": [_copy(each) for each in tensors.values()], "uses": uses}

    def share(self, channel: CollectiveChannel, mine: Sequence[tuple[int, int]]) -> None:
        """Exchange what was read with all trainers; a collective. mine: places and numbers of own batches."""
        if not self._metrics:
            return
        own = [[place, self._mine[number]] for place, number in mine if number in self._mine]
        everything = [each for said in gather_state(channel, own) for each in said]
        self._step = [read for _, read in sorted(everything, key=lambda each: int(each[0]))]

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


def _add(metric: MetricLike, taken: Mapping[str, Tensor]) -> None:
    """Count what `_taken` gave."""
    if isinstance(metric, Metric) and _selects(metric):
        metric.add_selection(taken)
    else:
        require_merge(metric)(taken)


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, and not in memory that a later batch may use."""
    return tensor.detach().to("cpu", copy=True).contiguous()


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
                self._computed[number] = self._compute(number)
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
        taken = self._joint.apply(agreement)
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
            self.work.records.forget(max(each.confirmed for each in agreement.contributions))
        return agreement, taken

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

    def _compute(self, number: int) -> StepBatch:
        """The gradients of one of this trainer's batches, if it has one that raises no error."""
        computed = self._train_batch(number, partial(self._gradients, number))
        return self._joint.add(number, computed or StepBatch(0))

    def _gradients(self, number: int, taken: TakenBatch) -> StepBatch:
        """Compute the gradients of a batch."""
        parts, samples = self._parts, taken.samples
        with blaming(taken.records):
            step = self._begin_batch(taken)
            if self._of_step is not None:  # generators belong to the batch, not to the trainer
                seed_random(self.work.seed, parts.counts.epoch, number)
            read = partial(self._metrics.read, number)
            losses = parts.setup.routine.gradients(step, parts.loss, parts.metrics, read, 1.0 / samples)
            self.work.bad.computed = True
            done = {} if self._of_step is not None else taken.done
            return StepBatch(
                place=0,
                samples=samples,
                records={str(token): count for token, count in done.items()},
                losses={name: float(loss) for name, loss in losses.means().items()},
            )
