"""`AsyncFit`: one call of `Trainer.fit` on a trainer among others that come and go, in mode async.

Nobody waits for another while training: every trainer trains and commits its own batches (`OwnSteps`). A
*meeting* is the action that takes the place of a step. All trainers come to it between two batches:

- when an evaluation, a save or the end of training is due, which everyone sees by the tally of the servers,
- when a trainer asks for it, because it is time to save, or it was asked to stop or to leave,
- at the end of an epoch.

There they agree on how far the job is, and then do together what is due, as `ElasticFit` describes; nobody
trains again before the first one has saved. Trainers that have lost another, or that one wants to join, go to
the next round instead, which begins with a meeting as well: the tally then has what lost trainers have
committed. A trainer that joins gets the rest of the state from another one, and parameters from the servers.

Reports between meetings have the losses and metrics of the batches of the first trainer alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from karvan.activity import activity
from karvan.data.task_records import blaming
from karvan.dense.remote import ElasticDense
from karvan.distributed.parameter_servers import OwnCommits, SentCommit, Tally
from karvan.errors import Training, mark
from karvan.train.elastic_fit import ElasticFit
from karvan.train.feed import FedBatch
from karvan.train.leased_work import Agreement, FitSteps, LeasedFit
from karvan.train.results import StepLogs, TrainingCounts, gather_state, joined


class TrainedBatch(NamedTuple):
    """A batch whose commit is on its way; taken: whether its gradients were finite."""

    batch: Any
    samples: int
    losses: Mapping[str, Tensor]
    taken: bool


@dataclass
class TrainedBatches:
    """How many batches and steps all trainers have made, by the tally of the servers.

    counted: the tally so far. left: batches that make no whole step yet.
    """

    counted: dict[str, int] = field(default_factory=dict)
    left: int = 0

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
        leaving, self.left = self.left, 0
        return 1 if leaving else 0


class OwnSteps(FitSteps):
    """The batches of one trainer in one fit.

    A batch is the unit: its gradients of rows and of dense parameters are staged at the servers, and the
    trainer commits them there, with the records that are done by it. What servers have committed is trained,
    and nothing else is. The trainer reports these records to the master behind the batch, and every commit
    has those that the master may not know. So whoever finds that a trainer is gone learns from the servers
    what it has trained, and reports it before others get the rest of its records.

    `TrainedBatches` counts: a step is as many batches as there are trainers, whoever computes them, as with a
    fixed number of trainers. So `log_every`, `checkpoint_every`, `eval_every`, `max_steps` and schedules mean
    the same. Servers add up the batches of all trainers, so that each of them knows the step without asking
    others.
    """

    def __init__(self, fit: LeasedFit) -> None:
        super().__init__(fit)
        assert isinstance(self._commits, OwnCommits)
        self.commits = self._commits
        self._sent: tuple[SentCommit, int, dict[int, int]] | None = None  # with its number and records
        self._unconfirmed: dict[int, dict[int, int]] = {}  # records that the master may not know, by number
        self.left_metrics: list[Any] = []  # states of those that left at the last meeting
        self.world = 1  # how many trainers the round had in which batches were trained last

    # Batches

    def train_next(self) -> TrainedBatch | None:
        """Train one more batch, up to its commit, which `finish` waits for; None if there is none for now."""
        assert self._sent is None
        return self._train_batch(0, self._train)

    def _train(self, batch: FedBatch) -> TrainedBatch:
        trainer, routine = self._trainer, self._trainer.setup.routine
        step = self._begin_batch(batch)
        number = self.commits.begin_own()
        trainer.setup.dense.fresh()
        with blaming(batch.records):
            losses = routine.gradients(step, trainer.loss, trainer.metrics, trainer.count)
        self.bad.computed = True
        made_step = bool(routine.apply(step))
        done, confirmed = batch.done, self.records.confirmed
        self._unconfirmed = {step: its for step, its in self._unconfirmed.items() if step > confirmed}
        self._unconfirmed[number] = done
        counts = {"samples": batch.samples, "skipped": int(not made_step)}
        ahead = {str(token): n for _, its in sorted(self._unconfirmed.items()) for token, n in its.items()}
        self._sent = self.commits.commit_own(counts, ahead), number, done
        return TrainedBatch(batch.batch, batch.samples, losses.means(), made_step)

    def finish(self) -> Tally | None:
        """Wait until all servers have the last commit; the tally, if there was one to wait for."""
        if self._sent is None:
            return None
        sent, number, records = self._sent
        tally = sent.wait()
        self._sent = None
        self.records.add(number, records, report=True)
        return tally

    # Meetings

    def agree(self, *, save: bool) -> dict[str, Any]:
        """Meet all others, between two batches of everyone; a collective. save: a checkpoint is due."""
        self._complete()
        self.left_metrics = []
        channel = self._group.channel
        agreement = Agreement.gather(channel, 0, self._contribution(save=save))
        leaves = [contribution.leaves for contribution in agreement.contributions]
        if len({*leaves}) == 2:  # the states of metrics of those that leave go to the others
            mine = self._trainer.metric_states() if leaves[channel.rank] else {}
            self.left_metrics = list(compress(gather_state(channel, mine), leaves))
        tally = channel.gather_json(self.commits.ask().counts if channel.rank == 0 else None)[0]
        return {"agreement": agreement.as_json(), "tally": tally, "world": channel.world_size}

    def _complete(self) -> None:
        """All batches of this trainer are committed everywhere, and the master knows their records."""
        self.finish()
        self.records.flush()

    def regrouped(self) -> None:
        """Another round has begun: this trainer comes to it between two batches, and says so to servers."""
        self._complete()
        self.commits.members(self._group.round.number)

    def missed(self) -> dict[str, Any]:
        """Settle what trainers that are gone have done; the result of a meeting, about all batches so far."""
        for member in self._gone():
            acknowledged = self.commits.settle(member)
            if acknowledged:
                self.acknowledge({int(token): done for token, done in acknowledged.items()})
        return {"agreement": None, "tally": self.commits.ask().counts, "world": self.world}

    @override
    def _gone(self) -> list[int]:
        """All trainers that are not in the round any more.

        Servers know those that have trained, also in rounds of which this trainer has not heard.
        """
        now = self._group.round
        return sorted({*self.commits.members(now.number), *self._group.gone} - {*now.members})


_IDLE = 0.02  # seconds between two questions for a batch, while others work on the last records of an epoch


class AsyncFit(ElasticFit):
    """Trains a Trainer's model on leased data, beside the trainers of the group."""

    def _make_steps(self) -> FitSteps:
        self._batches = TrainedBatches()
        self._met = 0  # the step at the last meeting
        self._metric_states: list[Any] = []  # of all trainers at the last meeting
        self._own_steps = OwnSteps(self._leased)
        return self._own_steps

    # Rounds

    def _regroup(self) -> None:
        super()._regroup()
        self._own_steps.world = self._group.world_size

    def _begin_run(self) -> None:
        self._own_steps.abandon()  # those who had the state of training, if there were any
        trained = self._own_steps.commits.ask()
        if trained.batches and self._trainer.saver.newest_step() is None and not self._own_steps.commits.step:
            raise mark(
                RuntimeError(
                    f"All trainers that have trained the first {trained.batches} batches of the job are "
                    "gone, and there is no checkpoint: start the job again from the beginning, on empty "
                    "servers."
                ),
                temporary=True,
            )
        super()._begin_run()
        self._batches = TrainedBatches(dict(trained.counts))
        self._met = self._counts.step

    def _begin_training(self) -> None:
        dense = self._trainer.setup.dense
        if isinstance(dense, ElasticDense):
            dense.fill() if self._first else dense.join()
        super()._begin_training()

    def _everything(self) -> dict[str, Any]:
        return {**super()._everything(), "batches": asdict(self._batches), "met": self._met}

    def _receive(self, everything: Mapping[str, Any]) -> None:
        super()._receive(everything)
        for metric in self._trainer.metrics.values():  # they are of one's own batches
            metric.reset()
        self._batches = TrainedBatches(**everything["batches"])
        self._met = everything["met"]

    # Training alone

    def _act(self) -> None:
        """Do what is due together with the others, or train alone until something is."""
        if self._todo or self._train_alone():
            super()._act()
        else:
            self._regroup_due = True

    def _train_alone(self) -> bool:
        """Train until a meeting is due; False if the round is over."""
        self._group.channel.barrier()  # the first one may still be saving what all have trained
        while not self._group.regroup_wanted:
            if (tally := self._own_steps.finish()) is not None:
                self._note_tally(tally)
            if self._meeting_due(tally):
                return True
            if (trained := self._own_steps.train_next()) is not None:
                self._note_batch(trained)
            elif self._own_steps.ended:
                return True
            else:
                time.sleep(_IDLE)
                self._note_tally(asked := self._own_steps.commits.ask())
                if self._meeting_due(asked):
                    return True
        return False

    def _meeting_due(self, tally: Tally | None) -> bool:
        saves = self._first and self._trainer.saver.due_by_time()
        if saves or self._trainer.stop_request.reason is not None:
            self._own_steps.commits.ask(meeting=self._actions + 1)
            return True
        asked = tally is not None and tally.meeting > self._actions
        return asked or self._has_all() or bool(self._due_since_meeting())

    def _due_since_meeting(self) -> set[str]:
        """What is due after one of the steps since the last meeting."""
        due = set()
        for step in range(self._met + 1, self._counts.step + 1):
            if self._goal.evaluates_after_step(TrainingCounts(step=step)):
                due.add("evaluate")
            if self._trainer.saver.due_by_steps(step):
                due.add("save")
        return due

    def _note_batch(self, trained: TrainedBatch) -> None:
        """A batch of this trainer is trained."""
        trainer, counts = self._trainer, self._counts
        Training.started = True
        activity.advance()
        if trained.taken:
            self._outcomes.take()
        else:
            self._outcomes.skip(counts.step, [trained.batch])
        self._window.add(trained.losses)
        trainer.callbacks.on_step_end(
            trainer, StepLogs(counts.step, counts.epoch, trained.samples, trained.losses, trained.taken)
        )

    def _note_tally(self, tally: Tally) -> None:
        """Batches of all trainers are trained."""
        trainer, before = self._trainer, self._counts.step
        self._count(tally.counts, self._group.world_size)
        step = self._counts.step
        if self._first and step > before:
            trainer.progress.step(step)
            if step // self._reporter.period > before // self._reporter.period:
                self._reporter.training(trainer.metric_values())
            elif self._reporter.shows(step):
                self._reporter.show(trainer.metric_values())

    def _count(self, tally: Mapping[str, int], world: int) -> None:
        steps, new = self._batches.advance(tally, world)
        counts = self._counts
        counts.batches += new.get("batches", 0)
        counts.samples += new.get("samples", 0)
        counts.skipped += new.get("skipped", 0)
        self._unsaved = self._unsaved or new.get("batches", 0) > 0
        self._count_steps(steps)

    def _count_steps(self, steps: int) -> None:
        self._counts.step += steps
        self._trained += steps
        for _ in range(steps):
            self._trainer.schedule.after("step")

    # Meetings

    def _complete_step(self, result: Mapping[str, Any]) -> None:
        trainer = self._trainer
        self._count(result["tally"], result["world"])
        if result["agreement"] is None:
            self._plan_due(saves=False)
            return
        agreement = Agreement.from_json(result["agreement"])
        self._take_over(agreement)
        if agreement.ended:
            self._count_steps(self._batches.end_epoch())
        self._plan_due(saves=any(contribution.save for contribution in agreement.contributions))
        if agreement.ended:
            self._end_epoch()
        if self._first:
            trainer.progress.step(self._counts.step)
        self._react(agreement)

    def _take_over(self, agreement: Agreement) -> None:
        """The first one that stays counts the batches of those that leave in its metrics."""
        states, self._own_steps.left_metrics = self._own_steps.left_metrics, []
        stays = next((said.member for said in agreement.contributions if not said.leaves), None)
        if states and self._group.member == stays:
            for name, metric in self._trainer.metrics.items():
                metric.load_state(
                    joined(metric, [metric.state(), *(state[name] for state in states)]).state()
                )

    def _plan_due(self, *, saves: bool) -> None:
        """Plan what is due since the last meeting; saves: it is also time to save."""
        due = self._due_since_meeting() | ({"save"} if saves else set())
        if "evaluate" in due and "evaluate" not in self._todo:
            self._plan_evaluation()
        if "save" in due and "save" not in self._todo and not self._has_all():
            self._todo.append("save")
        self._met = self._counts.step

    def _training_metrics(self) -> dict[str, float]:
        return self._reporter.metrics()

    def _save_together(self) -> None:
        self._metric_states = gather_state(self._group.channel, self._trainer.metric_states())

    def _trained_state(self) -> dict[str, Any]:
        state = super()._trained_state()
        if self._metric_states:
            metrics = {
                name: joined(metric, [metric_state[name] for metric_state in self._metric_states]).state()
                for name, metric in self._trainer.metrics.items()
            }
            state["ranks"] = [{**state["ranks"][0], "metrics": metrics}]
        return state

    def _finish_together(self) -> dict[str, Any]:
        self._trainer.setup.dense.settle()
        return super()._finish_together()
