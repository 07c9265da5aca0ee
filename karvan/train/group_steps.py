"""`GroupSteps`: the steps that a trainer makes together with those of its round.

It takes this trainer's batches, computes their gradients once, however often trainers have to agree anew, and
reports the records of committed steps to the master.

A batch that raises an error is no batch of the step: its bad record is reported (`leased_work.py`), all that
is leased and not trained returns to the master, and the trainer takes part in the step without a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from karvan.data.task_records import blaming
from karvan.dense.steps import all_finite
from karvan.distributed import CollectiveChannel
from karvan.distributed.elastic import ordered_sum
from karvan.distributed.parameter_servers import StagedPart, StepCommits
from karvan.metrics.base import Metric
from karvan.train.data_parallel import flat_gradients, set_gradients
from karvan.train.feed import FedBatch
from karvan.train.leased_work import Agreement, FitSteps, LeasedFit, StepBatch
from karvan.train.results import gather_state, require_merge, seed_random
from karvan.train.types import MetricLike


class ComputedBatch(NamedTuple):
    """A batch that this trainer has computed: what it says of it, dense gradients, and pushes of rows'."""

    said: StepBatch
    gradients: Tensor
    staged: list[StagedPart]


def committed_step(commits: StepCommits | None, step: int, lost: Iterable[int]) -> dict[str, Any] | None:
    """What a server says of this step, if it was committed by a trainer that is gone.

    One that is only silent, and wakes, cannot commit it any more.
    """
    if commits is None:
        return None
    commits.flush()
    for member in sorted(lost):
        commits.fence(member)
    newest = [progress for progress in commits.progress() if progress.committed == step]
    return dict(newest[0].ack) if newest else None


class SharedMetrics:
    """Counts the batches of committed steps in metrics; by name.

    Before a step is committed, every trainer gets what metrics need of the others' batches: scores, labels,
    weights and groups. When it is committed, each counts all of them, in the order of the batches. So metrics
    are the same on all trainers, no sample is lost with a trainer, and the number of trainers does not change
    them.
    """

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
    """The steps of one fit that trainers make together.

    One step of all trainers of a round, which happens on all of them or on none.

    1. Each trainer prepares: it computes the gradients of its batches, sends those of rows to the servers,
       which stage them, and takes part in the sum of the dense ones. It has changed nothing.
    2. When its own part is complete everywhere, it says so to all others, together with what the step has of
       it (`Contribution`). A trainer that has heard it from all has *committed* the step: it applies the sum,
       and the servers apply what they have staged.

    If a trainer dies, the others compare. A step that one of them, or a server, has committed was prepared by
    all, so the others commit it, too. A step that nobody has committed is made again, by those who are left:
    their gradients are the same, only the sum is another.

    Gradients are sums over samples until the step is committed. Then they are divided by the number of
    samples of all batches, whoever has computed them. They are added in the order of the batches' places in
    the step.
    """

    def __init__(self, fit: LeasedFit) -> None:
        super().__init__(fit)
        self._update = fit.trainer.setup.update
        self._parameters = [parameter for parameter in self._update.parameters() if parameter.requires_grad]
        self._metrics = SharedMetrics(fit.trainer.metrics)
        self._computed: dict[int, ComputedBatch] = {}  # this trainer's batches of the step, by number
        self._total: Tensor | None = None  # the sum of gradients over all trainers, once it is known

    def agree(self, *, save: bool) -> dict[str, Any]:
        """Make the next step with all others, except for its effects; a collective. Gives an `Agreement`.

        After a RankError it may be called again: gradients are not computed again. save: whether this trainer
        says that a checkpoint is due.
        """
        step, channel = self._trainer.counts.step + 1, self._group.channel
        if self._commits is not None:  # gradients from now on are of this step
            self._commits.begin_step(step)
        plan = self._batches.next_step()
        mine = plan.mine(channel.rank)
        numbers = [number for _, number in mine]
        for number in [number for number in self._computed if number not in numbers]:  # others compute it
            for push in self._computed.pop(number).staged:
                push.release()
        for number in numbers:
            if number not in self._computed:
                self._computed[number] = self._compute(step, number)
        self._metrics.share(channel, mine)
        contribution = self._contribution(
            batches=[asdict(replace(self._computed[number].said, place=place)) for place, number in mine],
            save=save,
            regroup=channel.rank == 0 and self._group.regroup_wanted,
            confirmed=self.records.confirmed,
        )
        gradients = [self._computed[number].gradients for number in numbers]
        self._total = ordered_sum(channel, gradients, plan.ranks) if plan.ranks else None
        for computed in self._computed.values():
            for push in computed.staged:
                push.wait()
        return Agreement.gather(channel, step, contribution).as_json()

    def _compute(self, step: int, number: int) -> ComputedBatch:
        """Compute one of this trainer's batches; its gradients are sums over samples.

        A batch without samples has none.
        """
        batch = self._train_batch(number, partial(self._gradients, number)) or StepBatch(0)
        finite = self._update.unscale()
        tables: list[str] = []
        staged: list[StagedPart] = []
        if finite and batch.samples and self._commits is not None:
            before = len(self._commits.staged(step))
            tables = self._update.stage_rows()
            staged = self._commits.staged(step)[before:]
        flat = flat_gradients(self._parameters)
        self._update.forget()
        pushes = [list(push.part) for push in staged]
        said = replace(batch, finite=finite and all_finite([flat]), pushes=pushes, tables=tables)
        return ComputedBatch(said, flat, staged)

    def _gradients(self, number: int, batch: FedBatch) -> StepBatch:
        """Compute the gradients of a batch."""
        trainer, samples = self._trainer, batch.samples
        with blaming(batch.records):
            step = self._begin_batch(batch)
            if self._of_step is not None:  # generators belong to the batch, not to the trainer
                seed_random(self.seed, trainer.counts.epoch, number)
            read = partial(self._metrics.read, number)
            losses = trainer.setup.routine.gradients(step, trainer.loss, trainer.metrics, read, 1.0 / samples)
            self.bad.computed = True
            done = {} if self._of_step is not None else batch.done
            return StepBatch(
                place=0,
                samples=samples,
                records={str(token): count for token, count in done.items()},
                losses={name: float(loss) for name, loss in losses.means().items()},
            )

    def apply(self, result: Mapping[str, Any]) -> tuple[Agreement, bool]:
        """The effects of a step that is committed: what was agreed on, and whether it was taken."""
        agreement = Agreement.from_json(result)
        if agreement.samples:
            self._commit(agreement)  # servers apply it while this trainer makes the dense step
            if agreement.taken:
                assert self._total is not None
                set_gradients(self._parameters, self._total / agreement.samples)
                self._update.count_tables({table for batch in agreement.batches for table in batch.tables})
            self._update.finish(agreement.taken)
            self._metrics.count()
        else:
            self._metrics.forget()
        self._computed, self._total = {}, None
        if self._of_step is not None:
            seed_random(self.seed, -1, self._trainer.counts.step)
        elif agreement.samples:
            self.records.add(agreement.step, agreement.records, report=self._group.rank == 0)
        if self._group.rank != 0:
            self.records.forget(max(contribution.confirmed for contribution in agreement.contributions))
        return agreement, agreement.taken

    def _commit(self, agreement: Agreement) -> None:
        servers = self._connection.servers
        if servers is None or self._commits is None:
            return
        batches = agreement.batches if agreement.taken else []
        pushes = [(member, number) for batch in batches for member, number in batch.pushes]
        scale = agreement.row_scale(servers.hello["grad_reduce"])
        self._commits.commit(agreement.step, pushes, scale, agreement.as_json())
        self._commits.send()

    def missed(self) -> dict[str, Any] | None:
        """The agreement of a step that servers have committed, and no trainer that is left."""
        return committed_step(self._commits, self._trainer.counts.step + 1, self._group.gone)

    def regrouped(self) -> None:
        """Another round has begun."""
        self._batches.regrouped()
