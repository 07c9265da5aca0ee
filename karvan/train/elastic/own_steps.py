"""`OwnSteps`: the batches that a trainer trains on its own, in mode async, and what it needs of the others.

A batch is the unit: its gradients of rows and of dense parameters are staged at the servers, and the trainer
commits them there, with the records that are done by it. What servers have committed is trained, and nothing
else is. The trainer reports these records to the master behind the batch, and every commit has those that the
master may not know. So whoever finds that a trainer is gone learns from the servers what it has trained, and
reports it before others get the rest of its records.

`TrainedBatches` counts: a step is as many batches as there are trainers, whoever computes them, as with a
fixed number of trainers. So `log_every`, `checkpoint_every`, `eval_every`, `max_steps` and schedules mean the
same. Servers add up the batches of all trainers, so that each of them knows the step without asking others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import Tensor

from karvan.data.leasing.record_search import blaming
from karvan.distributed.step_commits import OwnCommits, SentCommit, Tally
from karvan.train.elastic.joint_step import Agreement, Contribution
from karvan.train.elastic.leased_work import FitSteps
from karvan.train.elastic.step_batches import LeasedFit, TakenBatch
from karvan.train.state.gathering import gather_state


class TrainedBatch(NamedTuple):
    """A batch whose commit is on its way; taken: whether its gradients were finite."""

    batch: Any
    samples: int
    losses: Mapping[str, Tensor]
    taken: bool


class TrainedBatches:
    """How many batches and steps all trainers have made, by the tally of the servers."""

    def __init__(self) -> None:
        self.counted: dict[str, int] = {}  # of the tally
        self.left = 0  # batches that make no whole step yet

    def begin(self, tally: Mapping[str, int]) -> None:
        """Count from here on."""
        self.counted, self.left = dict(tally), 0

    def advance(self, tally: Mapping[str, int], world: int) -> tuple[int, dict[str, int]]:
        """The steps and counts that are new; world: how many trainers there were meanwhile.

        It does not matter in how many parts a tally is counted.
        """
        new = {name: count - self.counted.get(name, 0) for name, count in tally.items()}
        self.counted = dict(tally)
        steps, self.left = divmod(self.left + new.get("batches", 0), world)
        return steps, new

    def end_epoch(self) -> int:
        """The last step of an epoch may have fewer batches; the steps that are new."""
        left, self.left = self.left, 0
        return 1 if left else 0

    def state_dict(self) -> dict[str, Any]:
        """What a trainer that joins needs."""
        return {"counted": dict(self.counted), "left": self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as the trainer whose state this is."""
        self.counted, self.left = dict(state["counted"]), state["left"]


class OwnSteps(FitSteps):
    """The batches of one trainer in one fit."""

    def __init__(self, fit: LeasedFit) -> None:
        super().__init__(fit)
        servers = fit.parts.connection.servers
        assert servers is not None
        assert isinstance(servers.commits, OwnCommits)
        self._commits = servers.commits
        self._sent: tuple[SentCommit, int, dict[int, int]] | None = None  # with its number and records
        self._unconfirmed: dict[int, dict[int, int]] = {}  # records that the master may not know, by number
        self.left_metrics: list[Any] = []  # states of those that left at the last meeting
        self._world = 1  # how many trainers the round had in which batches were trained last

    @property
    def number(self) -> int:
        """That of this trainer's last batch in the run; 0 before the first."""
        return self._commits.step

    @property
    def ended(self) -> bool:
        """Whether all records of the epoch are done, by whomever."""
        return self._batches.ended

    # Batches

    def train_next(self) -> TrainedBatch | None:
        """Train one more batch, up to its commit, which `finish` waits for; None if there is none for now."""
        assert self._sent is None
        return self._train_batch(0, self._train)

    def _train(self, taken: TakenBatch) -> TrainedBatch:
        parts, routine = self._parts, self._parts.setup.routine
        step = self._begin_batch(taken)
        number = self._commits.begin_own()
        parts.setup.dense.fresh()
        with blaming(taken.records):
            losses = routine.gradients(step, parts.loss, parts.metrics, parts.count)
        self.work.bad.computed = True
        made_step = bool(routine.apply(step))
        done, confirmed = taken.done, self.work.records.confirmed
        self._unconfirmed = {each: its for each, its in self._unconfirmed.items() if each > confirmed}
        self._unconfirmed[number] = done
        counts = {"samples": taken.samples, "skipped": int(not made_step)}
        self._sent = self._commits.commit_own(counts, self._acknowledged()), number, done
        return TrainedBatch(taken.batch, taken.samples, losses.means(), made_step)

    def _acknowledged(self) -> dict[str, int]:
        """The records of committed batches that the master may not know, by token, for JSON."""
        known: dict[int, int] = {}
        for number in sorted(self._unconfirmed):
            known |= self._unconfirmed[number]
        return {str(token): done for token, done in known.items()}

    def finish(self) -> Tally | None:
        """Wait until all servers have the last commit; the tally, if there was one to wait for."""
        if self._sent is None:
            return None
        sent, number, records = self._sent
        tally = sent.wait()
        self._sent = None
        self.work.records.add(number, records, report=True)
        return tally

    def ask(self, meeting: int = 0) -> Tally:
        """The tally; see `OwnCommits.ask`."""
        return self._commits.ask(meeting)

    # Meetings

    def agree(self, *, save: bool) -> dict[str, Any]:
        """Meet all others, between two batches of everyone; a collective. save: a checkpoint is due."""
        self._complete()
        self.left_metrics = []
        stop = self._parts.stop_request.reason
        contribution = Contribution(
            member=self._group.member,
            ended=self._batches.ended,
            stop=None if stop == "terminate" else stop,
            save=save,
            leaves=stop == "terminate",
        )
        channel = self._group.channel
        said = channel.gather_json(asdict(contribution))
        agreement = Agreement(0, tuple(Contribution(**each) for each in said))
        if len({each.leaves for each in agreement.contributions}) == 2:
            self.left_metrics = self._gather_left(agreement)
        tally = channel.gather_json(self.ask().counts if channel.rank == 0 else None)[0]
        return {"agreement": agreement.as_json(), "tally": tally, "world": channel.world_size}

    def _gather_left(self, agreement: Agreement) -> list[Any]:
        """The states of metrics of those that leave; a collective."""
        channel, leaves = self._group.channel, [each.leaves for each in agreement.contributions]
        metrics = self._parts.metrics if leaves[channel.rank] else {}
        states = gather_state(channel, {name: metric.state() for name, metric in metrics.items()})
        return [state for state, left in zip(states, leaves, strict=True) if left]

    def _complete(self) -> None:
        """All batches of this trainer are committed everywhere, and the master knows their records."""
        self.finish()
        self.work.records.flush()

    def regrouped(self) -> None:
        """Another round has begun: this trainer comes to it between two batches, and says so to servers."""
        self._complete()
        self._commits.members(self._group.round.number)

    def missed(self) -> dict[str, Any]:
        """Settle what trainers that are gone have done; the result of a meeting, about all batches so far."""
        for member in self._gone():
            acknowledged = self._commits.settle(member)
            if acknowledged:
                self.work.acknowledge({int(token): done for token, done in acknowledged.items()})
        return {"agreement": None, "tally": self.ask().counts, "world": self._world}

    def settle(self) -> None:
        """It is settled what trainers that are gone have done: others get the rest of it; rank 0."""
        self.abandon()
        self._group.settle()

    def abandon(self) -> None:
        """Servers and embedding workers forget trainers that are gone."""
        gone = self._gone()
        for member in gone:
            self._commits.abandon(member)
        self._parts.connection.abandon(gone)

    def _gone(self) -> list[int]:
        """All trainers that are not in the round any more.

        Servers know those that have trained, also in rounds of which this trainer has not heard.
        """
        now = self._group.round
        return sorted({*self._commits.members(now.number), *self._group.gone} - {*now.members})

    def begin_round(self) -> None:
        """The round trains from now on."""
        self._world = self._group.world_size
