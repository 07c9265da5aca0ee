"""`AsyncFit`: one call of `Trainer.fit` on a trainer among others that come and go, in mode async.

Nobody waits for another while training: every trainer trains and commits its own batches (`own_steps.py`). A
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
from typing import Any

from karvan.activity import activity
from karvan.dense.remote import ElasticDense
from karvan.distributed.step_commits import Tally
from karvan.exit_codes import note_training
from karvan.outages import mark
from karvan.train.elastic.elastic_fit import ElasticFit
from karvan.train.elastic.joint_step import Agreement
from karvan.train.elastic.leased_work import FitSteps
from karvan.train.elastic.own_steps import OwnSteps, TrainedBatch, TrainedBatches
from karvan.train.reporting.results import StepLogs, TrainingCounts
from karvan.train.state.gathering import gather_state, joined

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
        self._own_steps.begin_round()

    def _begin_run(self) -> None:
        self._own_steps.abandon()  # those who had the state of training, if there were any
        trained = self._own_steps.ask()
        if trained.batches and self._parts.saver.newest_step() is None and not self._own_steps.number:
            raise mark(
                RuntimeError(
                    f"All trainers that have trained the first {trained.batches} batches of the job are "
                    "gone, and there is no checkpoint: start the job again from the beginning, on empty "
                    "servers."
                ),
                temporary=True,
            )
        super()._begin_run()
        self._batches.begin(trained.counts)
        self._met = self._counts.step

    def _begin_training(self) -> None:
        dense = self._parts.setup.dense
        if isinstance(dense, ElasticDense):
            dense.fill() if self._first else dense.join()
        super()._begin_training()

    def _everything(self) -> dict[str, Any]:
        return {**super()._everything(), "batches": self._batches.state_dict(), "met": self._met}

    def _receive(self, everything: Mapping[str, Any]) -> None:
        super()._receive(everything)
        for metric in self._parts.metrics.values():  # they are of one's own batches
            metric.reset()
        self._batches.load_state_dict(everything["batches"])
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
                self._note_tally(asked := self._own_steps.ask())
                if self._meeting_due(asked):
                    return True
        return False

    def _meeting_due(self, tally: Tally | None) -> bool:
        saves = self._first and self._parts.saver.due_by_time()
        if saves or self._parts.stop_request.reason is not None:
            self._own_steps.ask(meeting=self._actions + 1)
            return True
        asked = tally is not None and tally.meeting > self._actions
        return asked or self._has_all() or bool(self._due_since_meeting())

    def _due_since_meeting(self) -> set[str]:
        """What is due after one of the steps since the last meeting."""
        due = set()
        for step in range(self._met + 1, self._counts.step + 1):
            if self._goal.evaluates_after_step(TrainingCounts(step=step)):
                due.add("evaluate")
            if self._parts.saver.due_by_steps(step):
                due.add("save")
        return due

    def _note_batch(self, trained: TrainedBatch) -> None:
        """A batch of this trainer is trained."""
        parts, counts = self._parts, self._counts
        note_training()
        activity.advance()
        if trained.taken:
            self._skips.take()
        else:
            self._skips.skip(counts.step, [trained.batch])
        self._window.add(trained.losses)
        parts.callbacks.on_step_end(
            self._trainer, StepLogs(counts.step, counts.epoch, trained.samples, trained.losses, trained.taken)
        )

    def _note_tally(self, tally: Tally) -> None:
        """Batches of all trainers are trained."""
        parts, before = self._parts, self._counts.step
        self._count(tally.counts, self._group.world_size)
        step = self._counts.step
        if self._first and step > before:
            parts.progress.step(step)
            if step // self._reporter.period > before // self._reporter.period:
                self._reporter.training(self._own_metrics())
            elif self._reporter.shows(step):
                self._reporter.show(self._own_metrics())

    def _own_metrics(self) -> dict[str, float]:
        """The metrics of the batches of this trainer."""
        return {name: metric.compute() for name, metric in self._parts.metrics.items()}

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
            self._parts.schedule.after_step()

    # Meetings

    def _complete_step(self, result: Mapping[str, Any]) -> None:
        parts = self._parts
        self._count(result["tally"], result["world"])
        if result["agreement"] is None:
            self._plan_due(saves=False)
            return
        agreement = Agreement.from_json(result["agreement"])
        self._take_over(agreement)
        if agreement.ended:
            self._count_steps(self._batches.end_epoch())
        self._plan_due(saves=any(each.save for each in agreement.contributions))
        if agreement.ended:
            self._end_epoch()
        if self._first:
            parts.progress.step(self._counts.step)
        self._react(agreement)

    def _take_over(self, agreement: Agreement) -> None:
        """The first one that stays counts the batches of those that leave in its metrics."""
        states, self._own_steps.left_metrics = self._own_steps.left_metrics, []
        stays = next((each.member for each in agreement.contributions if not each.leaves), None)
        if states and self._group.member == stays:
            for name, metric in self._parts.metrics.items():
                metric.load_state(joined(metric, [metric.state(), *(each[name] for each in states)]).state())

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
        own = {name: metric.state() for name, metric in self._parts.metrics.items()}
        self._metric_states = gather_state(self._group.channel, own)

    def _trained_state(self) -> dict[str, Any]:
        state = super()._trained_state()
        if self._metric_states:
            metrics = {
                name: joined(metric, [each[name] for each in self._metric_states]).state()
                for name, metric in self._parts.metrics.items()
            }
            state["ranks"] = [{**state["ranks"][0], "metrics": metrics}]
        return state

    def _finish_together(self) -> dict[str, Any]:
        self._parts.setup.dense.settle()
        return super()._finish_together()
