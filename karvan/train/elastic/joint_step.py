"""`JointStep`: one step of all trainers of a round, which happens on all of them or on none.

    1. Each trainer prepares: it computes the gradients of its batches, sends those of rows to the servers,
       which stage them, and takes part in the sum of the dense ones. It has changed nothing.
    2. When its own part is complete everywhere, it says so to all others, together with what the step has of
       it (`Contribution`). A trainer that has heard it from all has *committed* the step: it applies the sum,
       and the servers apply what they have staged.

If a trainer dies, the others compare. A step that one of them, or a server, has committed was prepared by
all, so the others commit it, too. A step that nobody has committed is made again, by those who are left:
their gradients are the same, only the sum is another.

Gradients are sums over samples until the step is committed. Then they are divided by the number of samples of
all batches, whoever has computed them. They are added in the order of the batches' places in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from karvan.dense.tensor_checks import all_finite
from karvan.distributed.elastic import ElasticGroup, ordered_sum
from karvan.distributed.parameter_servers import Servers
from karvan.distributed.step_commits import StagedPart, StepCommits
from karvan.train.elastic.step_batches import StepPlan
from karvan.train.step.data_parallel import flat_gradients, set_gradients
from karvan.train.step.optimizer_step import OptimizerStep


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
        found = [StepBatch(**each) for said in self.contributions for each in said.batches]
        return sorted((each for each in found if each.samples), key=lambda each: each.place)

    @property
    def samples(self) -> int:
        """Those of all batches."""
        return sum(each.samples for each in self.batches)

    @property
    def taken(self) -> bool:
        """Whether all gradients are finite; otherwise the step is skipped."""
        return all(each.finite for each in self.batches)

    @property
    def ended(self) -> bool:
        """Whether the epoch is over."""
        return all(each.ended for each in self.contributions)

    @property
    def stop(self) -> str | None:
        """Why training stops, if it does."""
        return next((each.stop for each in self.contributions if each.stop), None)

    @property
    def records(self) -> dict[int, int]:
        """How many records are done, by token."""
        return {int(token): done for each in self.batches for token, done in each.records.items()}

    @property
    def losses(self) -> dict[str, float]:
        """The means over all samples."""
        sums: dict[str, float] = {}
        for each in self.batches:
            for name, loss in each.losses.items():
                sums[name] = sums.get(name, 0.0) + loss * each.samples
        return {name: total / self.samples for name, total in sums.items()}

    def row_scale(self, grad_reduce: str) -> float:
        """The factor of rows' gradients, which are sums over samples.

        Servers add them up, or take the mean over the batches that have a key ("key"). "mean" divides by all
        samples; otherwise a batch has the gradient of its mean loss, as a rank of a fixed number has it.
        """
        return (1 if grad_reduce == "mean" else len(self.batches)) / self.samples

    def as_json(self) -> dict[str, Any]:
        """For other trainers, which may have missed it."""
        return {"step": self.step, "contributions": [asdict(each) for each in self.contributions]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Agreement:
        """What `as_json` gave."""
        return cls(value["step"], tuple(Contribution(**each) for each in value["contributions"]))


class JointStep:
    """Makes the steps of a Trainer's optimizers together with the other trainers of a round."""

    def __init__(self, group: ElasticGroup, update: OptimizerStep, servers: Servers | None) -> None:
        self._group = group
        self._update = update
        self._parameters = [each for each in update.parameters() if each.requires_grad]
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
        pushes = [list(each.part) for each in self._staged.get(number, ())]
        finite = finite and all_finite([flat])
        return replace(batch, finite=finite, pushes=pushes, tables=tables)

    def keep(self, numbers: Sequence[int]) -> None:
        """Forget all other batches: other trainers compute them now."""
        self._mine = {number: flat for number, flat in self._mine.items() if number in numbers}
        for number in [each for each in self._staged if each not in numbers]:
            for staged in self._staged.pop(number):
                staged.release()

    def agree(self, step: int, contribution: Contribution, plan: StepPlan) -> Agreement:
        """Commit the step with all others; a RankError if one is lost, after which it may be called again."""
        channel = self._group.channel
        mine = [self._mine[number] for _, number in plan.mine(channel.rank)]
        self._total = ordered_sum(channel, mine, plan.ranks) if plan.ranks else None
        for staged in self._staged.values():
            for each in staged:
                each.wait()
        said = channel.gather_json(asdict(contribution))
        return Agreement(step, tuple(Contribution(**each) for each in said))

    def apply(self, agreement: Agreement) -> bool:
        """Apply a step that is committed; whether it was taken, not skipped."""
        taken = agreement.taken
        if agreement.samples:
            assert self._total is not None
            self._commit(agreement, taken)  # servers apply it while this trainer makes the dense step
            if taken:
                set_gradients(self._parameters, self._total / agreement.samples)
                self._update.count_tables({table for each in agreement.batches for table in each.tables})
            self._update.finish(taken)
        self._mine, self._total, self._staged = {}, None, {}
        return taken

    def _commit(self, agreement: Agreement, taken: bool) -> None:
        if self._commits is None:
            return
        pushes = [(member, number) for each in agreement.batches for member, number in each.pushes]
        scale = agreement.row_scale(self._reduce)
        self._commits.commit(agreement.step, pushes if taken else [], scale, agreement.as_json())
        self._commits.send()

    def missed(self, step: int, gone: Iterable[int]) -> dict[str, Any] | None:
        """What a server says of this step, if it was committed by a trainer that is gone.

        One that is only silent, and wakes, cannot commit it any more.
        """
        if self._commits is None:
            return None
        self._commits.flush()
        for member in sorted(gone):
            self._commits.fence(member)
        newest = [each for each in self._commits.progress() if each.committed == step]
        return dict(newest[0].ack) if newest else None

    def abandon(self, members: Iterable[int]) -> None:
        """Servers drop what members that are gone have staged and looked up, and refuse their calls."""
        if self._commits is not None:
            for member in sorted(members):
                self._commits.abandon(member)
