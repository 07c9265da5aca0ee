"""`ElasticFit`: one call of `Trainer.fit` on a trainer among others that come and go.

Training is a sequence of *actions* that all trainers of a round do together: a step, a report, an evaluation,
a save. In one part of it they communicate, which gives all of them the same result. In the other each changes
its own state by that result. So all trainers have the same state after the same number of actions.

When the round is over, because a trainer was lost or one wants to join, they meet in the next and compare:

- A trainer can be one action behind another: it missed the end of the last communication. It gets the result
  from the other, and completes the action.
- A trainer that joins gets everything from one that has it: parameters, optimizers, schedules, counts, the
  actions that are due. It computes from the next step on.
- If nobody has anything, the first trainer loads the newest checkpoint, moves the ledger back to the position
  in it, and shares what it has loaded.
- Only then does the master lease the tasks of those who are gone to others. What they had trained is
  acknowledged, and what they had not is not.

A trainer that was started again is in the first fit of the program, which may be over: the others predict,
or are in a later fit. They meet it nevertheless (`welcome`), and it gets the state that they have; see
`karvan/distributed/elastic.py`.

An action that was not completed anywhere starts again, except that the gradients of a step are not computed
again. The first trainer of the round reports, saves, and acknowledges the records of all. The final
checkpoint is a task of the master's ledger, the export: if the first trainer dies while it makes it, the next
one does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from karvan.checkpoint.state_tree import pack, unpack
from karvan.data.leased_data import SharedData
from karvan.data.task_records import records_done
from karvan.distributed import RankError
from karvan.distributed.elastic import Standing, Standings
from karvan.errors import Training
from karvan.ragged import Batch
from karvan.train import train_state
from karvan.train.dataset import FinishedData
from karvan.train.evaluation import EvaluationSums
from karvan.train.fit import Begin, Fit, check_fit
from karvan.train.group_steps import GroupSteps
from karvan.train.leased_work import Agreement, FitSteps, LeasedFit
from karvan.train.reporter import Reporter
from karvan.train.results import FitResult, set_random_state
from karvan.train.saving import check_choice, owned_folder
from karvan.train.stopping import Goal


class LeasedEvaluations:
    """The evaluations of one fit.

    A slow trainer evaluates fewer records. A trainer keeps the leases of what it has evaluated until all have
    added up their results. So if one dies before, its tasks, and only these, are leased by the others, who
    have kept their own results.
    """

    def __init__(self, fit: LeasedFit) -> None:
        self._fit = fit
        self._current: tuple[int, EvaluationSums] | None = None  # its number, and what was evaluated
        self._done: dict[int, int] = {}  # records of leased tasks, by token

    def results(self, data: Iterable[Any], number: int) -> dict[str, float]:
        """Those of the next evaluation, or of the one that was interrupted; a collective.

        All trainers give an evaluation the same number, which no other one has since the run began. After a
        RankError it is called again, in the next round: it evaluates what is left.
        """
        if not isinstance(data, SharedData):
            return self._fit.trainer.evaluate(data)
        evaluator = self._fit.trainer.evaluator
        if self._current is None:
            self._current = number, evaluator.begin(self._fit.trainer.metrics)
        number, sums = self._current
        with closing(self._batches(data, number)) as batches:
            evaluator.add(sums, data, batches)
        return evaluator.results(sums, self._fit.group.channel)

    def end(self) -> None:
        """All have the results: the leases can end."""
        if self._done:
            self._fit.client.acknowledge(self._done)
        self._current, self._done = None, {}

    def _batches(self, data: SharedData, number: int) -> Generator[Batch, None, None]:
        # Reading begins here, when the evaluator has said which columns must have values.
        loader = data.lease_evaluation(self._fit.client, number)
        try:
            for batch in loader:
                self._done |= records_done(loader.hand_over())
                yield batch
        finally:
            loader.stop()


_log = logging.getLogger("karvan.train")

_GOODBYE = 10.0  # seconds; a master that is out of reach learns of the end of this process by itself
_IDLE = 0.02  # seconds between two steps without a batch, while others work on the last records of an epoch


class ElasticFit(Fit):
    """Trains a Trainer's model on leased data, together with the trainers of the group."""

    def __init__(self, leased: LeasedFit, goal: Goal, begin: Begin) -> None:
        super().__init__(leased.trainer, leased.data, goal, begin)
        self._leased = leased
        self._group = leased.group
        self._evaluations = LeasedEvaluations(leased)
        self._stack = ExitStack()
        self.begun = False  # whether this trainer has the state of training
        self._first = False  # whether it has reported, saved and acknowledged for all
        self._regroup_due = True
        self._todo: list[str] = []  # actions that are due before the next step
        self._actions = 0  # that are complete
        self._last: dict[str, Any] | None = None  # the last of them, and its result
        self._result: FitResult | None = None
        self._call = 0  # which one of the program this is; after the fit, which one this trainer is in
        self._ahead: frozenset[int] = frozenset()  # members that wait for this one in a later call

    def run(self) -> FitResult:
        """Train."""
        trainer = self._trainer
        with self._stack as stack:
            self._call = stack.enter_context(self._group.calls.fit())
            self._started = time.monotonic()
            if self._call < self._group.calls.passed:
                return self._over_before()
            self._enter(stack)
            check_fit(trainer, self._goal)
            check_choice(trainer.saver, self._how.resume)
            self._run_data.identify(self._data, self._how.data_name)
            drops = self._run_data.drops_rest(trainer.saver.latest(), self._how.drop_unfinished)
            spec = self._leased.data.spec(self._leased.work.most_tries, self._leased.work.skip_bad_records)
            self._leased.client.open(spec, drops)
            self._transforms.use(self._data, self._goal.eval_data)
            self._steps = self._make_steps()
            stack.callback(self._group.dissolve)
            stack.callback(self._steps.close)
            try:
                while self._result is None:
                    self._go_on()
            except BaseException:
                with suppress(Exception):  # the error that ends this trainer is what to report
                    self._group.leave(_GOODBYE)
                raise
            return self._result

    def _make_steps(self) -> FitSteps:
        self._group_steps = GroupSteps(self._leased)
        return self._group_steps

    def _go_on(self) -> None:
        """Do the next action; if a trainer is lost, prepare to do it again with the others."""
        try:
            if self._regroup_due:
                self._regroup()
            if self._result is None and not self._regroup_due:
                self._act()
        except RankError as error:
            _log.warning("%s", self._group.describe_loss(error))
            self._regroup_due = True

    # Rounds

    def _regroup(self) -> None:
        """Meet the others in the next round, and have the same state as they."""
        before = self._group.world_size if self.begun else 0
        self._group.regroup()
        if not self.begun:
            self._trainer.connection.rejoin(self._group.round.run)
        self._steps.regrouped()
        channel, counts, calls = self._group.channel, self._counts, self._group.calls
        knows = self.begun or calls.finished > 0
        mine = Standing(self._call, self.begun, knows, self._actions, self._last)
        all_said = Standings([Standing(**answer) for answer in channel.gather_json(asdict(mine))])
        leads, first = channel.rank == all_said.leader, all_said.first
        if not first.begun and leads:
            self._begin_run()
        elif self.begun and first.last is not None and self._actions < first.actions:
            self._complete(first.last["kind"], first.last["result"])
        missed = channel.gather_json(self._steps.missed() if leads and first.begun else None)[all_said.leader]
        if self.begun and missed is not None:
            self._complete("step", missed)
        if all_said.shares:
            states = channel.gather(pack(self._everything()) if leads else b"")
            if not self.begun and all_said.receives(channel.rank):
                self._receive(unpack(states[all_said.leader]))
        if channel.rank == 0:
            self._steps.settle()
            if self._result is None and not self._first:  # it reports, saves and acknowledges from now on
                self._first = True
                self._own_folder()
                self._open_reports()
        channel.barrier()  # those who ask for tasks next find what was released
        self._ahead = frozenset(self._group.round.members[rank] for rank in all_said.ahead_of(self._call))
        if self._result is None and self._call < all_said.passed:
            calls.passed = all_said.passed
            self._result = self._over_before()
            self._trainer.callbacks.on_fit_end(self._trainer, self._result)
        self._regroup_due = self._result is None and not all_said.together
        if self._first and not self._regroup_due and before and before != channel.world_size:
            self._trainer.progress.say(
                f"{channel.world_size} trainer{'s' * (channel.world_size != 1)} from step {counts.step} on, "
                f"after {before}."
            )

    def welcome(self, call: int) -> None:
        """After this fit, between two batches of a prediction: meet those who wait for the others.

        call: the one of the program that this trainer is in.
        """
        group = self._group
        self._call = call
        if not group.waiting - self._ahead - {group.member}:
            return
        try:
            self._regroup()
        except RankError as error:  # whoever still waits is met the next time
            _log.warning("%s", group.describe_loss(error))
        finally:
            group.dissolve()

    def _over_before(self) -> FitResult:
        """The result of a fit that was over when this trainer was started again."""
        newest = self._trainer.saver.latest()
        return self._make_result(None, None if newest is None else str(newest.path), {})

    def _begin_run(self) -> None:
        """Nobody has the state of training: load the newest checkpoint, or start from the beginning."""
        trainer = self._trainer
        self._own_folder()
        self._first = True
        trainer.saver.require_writable()
        resumed = self._resume()
        self._begin_training()
        self._announce(resumed)
        self._open_reports()
        if self._counts.batches == 0 and not self._over():
            self._begin_epoch()
        self._plan_end()

    def _begin_alone(self) -> None:
        super()._begin_alone()
        self._steps.restore(None)

    def _begin_training(self) -> None:
        trainer = self._trainer
        trainer.run_progress.columns = self._transforms.columns
        trainer.model.train()
        trainer.saver.begin()
        # It counts from here on, not from the start of the run.
        self._reporter = Reporter(trainer, self._goal.max_steps)  # how long an epoch is, only its end says
        self.begun = True
        trainer.callbacks.on_fit_begin(trainer)

    def _open_reports(self) -> None:
        trainer, counts = self._trainer, self._counts
        trainer.progress.begin(counts.step, self._goal.steps(self._data, self._passes, counts))
        self._stack.callback(trainer.progress.end)
        trainer.loggers.open(counts.step)
        self._stack.callback(trainer.loggers.close)

    def _own_folder(self) -> None:
        """Take the folder of checkpoints over from the last trainer that saved, should it still run."""
        folder, connection = self._trainer.saver.folder, self._trainer.connection
        self._stack.enter_context(owned_folder(folder, connection, self._group.client.group))

    def _load(self, saved: Mapping[str, Any], other: bool) -> None:
        super()._load(saved, other)
        if other:
            self._steps.restore(None)
        if self._evaluation_due:
            self._todo.append("evaluate")

    def _load_position(self, saved: Mapping[str, Any], random: Any) -> None:
        set_random_state(random)
        self._steps.restore(saved.get("work"))

    def _everything(self) -> dict[str, Any]:
        """What another trainer needs to train with this one."""
        return {
            "state": {**train_state.take(self._trainer), **self._transforms.state()},
            "past": [dict(vars(finished)) for finished in self._run_data.past],
            "todo": list(self._todo),
            "actions": self._actions,
            "last": self._last,
            "unsaved": self._unsaved,
            "saved_first": self._saved_first,
            "seed": self._steps.seed,
        }

    def _receive(self, everything: Mapping[str, Any]) -> None:
        """Become a copy of the trainer that has sent `_everything`."""
        trainer, state = self._trainer, everything["state"]
        trainer.setup.update.forget()
        train_state.restore(trainer, state)
        self._transforms.load(state)
        self._todo, self._actions = list(everything["todo"]), everything["actions"]
        self._last, self._unsaved = everything["last"], everything["unsaved"]
        self._saved_first = everything["saved_first"]
        self._steps.seed = everything["seed"]
        self._run_data.past = tuple(FinishedData(**finished) for finished in everything["past"])
        self._begin_training()

    # Actions

    def _act(self) -> None:
        """Do the next thing together with the others of the round."""
        kind = self._todo[0] if self._todo else "step"
        do_together, _ = self._parts_of(kind)
        self._complete(kind, do_together())

    def _complete(self, kind: str, result: Any) -> None:
        """Change this trainer's state by the result of an action, which is the same for all."""
        if kind != "step":
            self._todo.pop(0)
        _, complete = self._parts_of(kind)
        complete(result)
        self._actions += 1
        self._last = {"kind": kind, "result": result}
        self._plan_end()

    def _parts_of(self, kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Both parts of an action: what trainers do together, and what each does with its result."""
        actions: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
            "step": (self._step_together, self._complete_step),
            "report": (self._training_metrics, self._complete_report),
            "evaluate": (self._evaluate_together, self._complete_evaluation),
            "save": (self._save_together, lambda _: self._save()),
            "finish": (self._finish_together, self._complete_finish),
        }
        return actions[kind]

    def _plan_end(self) -> None:
        """After everything else that is due: the last report, evaluation and save."""
        if self._over() and "finish" not in self._todo and self._result is None:
            if self._evaluates_at_end() and "evaluate" not in self._todo:
                self._plan_evaluation()
            self._todo += ["report", "finish"]

    def _plan_evaluation(self) -> None:
        """Evaluate next; before the first time all that was trained is saved, in case it fails."""
        self._todo += ["save", "evaluate"] if self._saves_first() else ["evaluate"]

    # Steps

    def _step_together(self) -> dict[str, Any]:
        return self._steps.agree(save=self._first and self._trainer.saver.take_time())

    def _complete_step(self, result: Mapping[str, Any]) -> None:
        trainer, counts = self._trainer, self._counts
        agreement, applied = self._group_steps.apply(result)
        if agreement.samples:
            Training.started = True
            counts.step += 1
            counts.batches += len(agreement.batches)
            counts.samples += agreement.samples
            losses = {name: torch.tensor(loss) for name, loss in agreement.losses.items()}
            self._window.add(losses)
            self._note_step(agreement.samples, losses, applied, [])
            if counts.step % self._reporter.period == 0:
                self._todo.append("report")
            elif self._first and self._reporter.shows(counts.step):
                self._reporter.show(trainer.metric_values())
            if self._goal.evaluates_after_step(counts):
                self._plan_evaluation()
            saves = trainer.saver.due_by_steps(counts.step) or any(
                contribution.save for contribution in agreement.contributions
            )
            if saves and not self._has_all():
                self._todo.append("save")
        elif agreement.ended:
            self._end_epoch()
        else:
            time.sleep(_IDLE)
        self._react(agreement)

    def _react(self, agreement: Agreement) -> None:
        """Follow what trainers have said beside their step."""
        contributions = agreement.contributions
        leavers = {contribution.member for contribution in contributions if contribution.leaves}
        if leavers and len(leavers) == len(contributions):
            self._stopping.agree("terminate")
        elif self._group.member in leavers:
            self._leave()
        elif leavers or any(contribution.regroup for contribution in contributions):
            self._regroup_due = True
        if agreement.stop is not None:
            self._stopping.agree(agreement.stop)

    def _leave(self) -> None:
        """Leave the others, who continue: the records that were leased and not trained return."""
        self._steps.leave()
        self._group.leave()
        self._result = self._make_result("terminate", None, {})

    def _end_epoch(self) -> None:
        trainer, counts = self._trainer, self._counts
        if not counts.batches:
            raise ValueError(f"Epoch {counts.epoch} must have at least one batch, but the data gave none.")
        trainer.schedule.after("epoch")
        if self._goal.eval_data is not None and self._goal.eval_every is None:
            self._unsaved = True
            self._plan_evaluation()
        trainer.callbacks.on_epoch_end(trainer, counts.epoch)
        counts.epoch += 1
        counts.batches = 0
        self._unsaved = True
        if not self._over():
            self._begin_epoch()

    # Reports, evaluations, saves

    def _training_metrics(self) -> dict[str, float]:
        """The metrics of training so far; a collective, so that no trainer is two actions behind another."""
        self._group.channel.barrier()
        return self._trainer.metric_values()

    def _complete_report(self, metrics: Mapping[str, float]) -> None:
        if self._first:
            self._reporter.training(metrics)
        self._window.reset()

    def _results(self, data: Iterable[Any]) -> dict[str, float]:
        return self._evaluations.results(data, self._actions + 1)

    def _complete_evaluation(self, results: Mapping[str, float]) -> None:
        self._evaluations.end()
        super()._complete_evaluation(results)
        if self._trainer.saver.keeps_best and "save" not in self._todo:
            self._todo.insert(0, "save")

    def _save_together(self) -> None:
        """Gather what a checkpoint has of every trainer: nothing, since all have the same state."""
        self._group.channel.barrier()

    def _finish_together(self) -> dict[str, Any]:
        self._save_together()
        shared: dict[str, Any] = {}
        if self._first:
            finished = self._has_all() or self._trainer.stop_request.final
            with self._steps.export() if finished else nullcontext():
                shared["checkpoint"] = self._trainer.saver.finish(self._unsaved, self._snapshot)
            shared["bad_records"] = self._steps.bad_records()
        first = self._group.channel.gather_json(shared)[0]
        return {**first, "metrics": self._training_metrics()}

    def _complete_finish(self, result: Mapping[str, Any]) -> None:
        if self._unsaved:
            self._note_save()
        if self._stopping.reason is None:
            self._outcomes.end()
        result_ = self._make_result(self._stopping.reason, result["checkpoint"], result["metrics"])
        self._result = result_ = self._finish(replace(result_, bad_records=result["bad_records"]))
        if result_.stopped == "terminate":
            self._group.leave()  # for the master, the job is not done

    def _finished(self) -> bool:
        return super()._finished() and not self._evaluation_due

    def _state(self) -> dict[str, Any]:
        self._evaluation_due = "evaluate" in self._todo
        return {
            **self._trained_state(),
            **self._transforms.state(),
            "position": None,
            "epoch_random": None,
            "work": self._steps.position(),
            "evaluation_due": self._evaluation_due,
            "data": self._data_state(),
        }
