"""One call of `Trainer.fit`: `run` is the algorithm, the methods below are its steps.

A checkpoint has all that the rest of training depends on, and nothing that depends on time: model, rows,
optimizers, schedules, scaler, callbacks, metrics, random generators, counts, and the position of the data
after the batches that were trained on. So a fit that resumes from one ends with the same bits as one that
was never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from karvan.activity import activity
from karvan.checkpoint import Checkpoint
from karvan.data import Loader
from karvan.job.checkpoint_url import shown
from karvan.label_columns import required_labels
from karvan.train import dataset, train_state
from karvan.train.assembly import TrainerParts
from karvan.train.dataset import RunData, Transforms
from karvan.train.epoch import Epoch
from karvan.train.feed import FedBatch
from karvan.train.losses import SampleChecks
from karvan.train.preflight import NeededMetrics
from karvan.train.reporter import Reporter, show_banner
from karvan.train.results import FitResult, ReportWindow, StepLogs, TrainingCounts, set_random_state
from karvan.train.saving import Snapshot, check_choice, chosen, owned_folder
from karvan.train.step_routine import StepOutcomes
from karvan.train.stopping import Goal, Stopping


class Begin(NamedTuple):
    """How a fit begins where there are checkpoints; see `Trainer.fit`."""

    resume: bool | str = True
    drop_unfinished: bool = False
    data_name: str | None = None
    new_settings: bool = False


_Resumed: TypeAlias = tuple[Checkpoint, tuple[Mapping[str, Any], bool]] | None


def needed_metrics(trainer: TrainerParts) -> NeededMetrics:
    """The metrics by which the Trainer's callbacks and keep_best decide."""
    return NeededMetrics(trainer.callbacks.needs, trainer.saver.best_metric, trainer.schedule.metric)


def check_fit(trainer: TrainerParts, goal: Goal) -> None:
    """Raise if a fit of the Trainer to this goal cannot work, before its first step."""
    trainer.setup.check()
    needed = needed_metrics(trainer)
    needed.check_evaluated(goal.eval_data is not None)
    if is_own_evaluate(trainer):  # a method of the user's own may give any name
        needed.check_known(trainer.metrics, trainer.loss)


def is_own_evaluate(trainer: TrainerParts) -> bool:
    """Whether a Trainer evaluates as `kv.Trainer` does, not by a method of the user's own."""
    return trainer.evaluate.__module__ == "karvan.train.trainer"


class Fit:
    """Trains a Trainer's model on data until a goal is reached or a stop is requested."""

    def __init__(self, trainer: TrainerParts, data: Iterable[Any], goal: Goal, begin: Begin) -> None:
        self._trainer = trainer
        self._needed_metrics = needed_metrics(trainer)
        self._data = data
        self._goal = goal
        self._how = begin
        self._counts = trainer.counts
        self._window = trainer.window
        self._stopping = Stopping(trainer.connection, trainer.stop_request)
        self._transforms = Transforms(columns=trainer.run_progress.columns)
        self._run_data = RunData(self._transforms, trainer.connection, trainer.counts)
        runs, self._passes = trainer.setup.runs, trainer.setup.passes
        self._placement = runs.placement
        self._epoch = Epoch(
            data,
            runs,
            trainer.setup.passes,
            trainer.counts,
            stopped=lambda: trainer.stop_request.reason,
            due=trainer.saver.take_time,
            ends=self._stopping.agree,  # perhaps in the middle of a group
        )
        scaled, first = runs.precision.always_checks, trainer.connection.rank == 0
        self._outcomes = StepOutcomes(trainer.counts, scaled, first, trainer.nonfinite == "raise")
        self._alone = trainer.connection.world_size == 1
        self._first = True  # whether it reports and saves, which every rank does for its part
        self._unsaved = False
        self._saved_first = False  # whether there is a checkpoint from before the first evaluation
        self._evaluation_due = False  # whether an evaluation of this step comes next
        self._trained = 0

    def run(self) -> FitResult:
        """Train."""
        trainer = self._trainer
        with ExitStack() as stack:
            self._enter(stack)
            self._begin(stack)
            if self._evaluation_due:
                self._evaluate()
            while not self._over():
                with closing(self._epoch.groups(self._begin_epoch)) as groups, self._failing():
                    for group in groups:
                        self._train(group)
                        if self._counts.step % self._reporter.period == 0:
                            self._reporter.training()
                            self._outcomes.settle()
                        elif self._reporter.shows(self._counts.step):
                            self._reporter.show()
                        if self._goal.evaluates_after_step(self._counts):
                            self._evaluation_due = True
                            self._save_first()
                            self._evaluate()
                        saves = any(fed.save for fed in group)  # rank 0 says so
                        due = saves or trainer.saver.due_by_steps(self._counts.step)
                        due = due or (self._alone and trainer.saver.due_by_time())
                        if self._over():
                            break  # the save at the end is repeated if it fails
                        if due:
                            self._save()
                if self._epoch.complete:
                    self._end_epoch()
                elif self._epoch.empty:
                    self._run_data.warn_nothing_new()
            self._placement.forget()  # lookups made in advance are withdrawn, and are not counted
            return self._end()

    def _enter(self, stack: ExitStack) -> None:
        trainer = self._trainer
        stack.enter_context(activity.task("fit"))
        stack.enter_context(trainer.stop_request.signals())
        stack.enter_context(required_labels(self._data, trainer.loss, trainer.metrics.values()))

    def _over(self) -> bool:
        return self._stopping.reason is not None or self._has_all()

    def _has_all(self) -> bool:
        """Whether this data is trained to its end."""
        before = self._run_data.before
        return (before is not None and before.early) or self._epoch.empty or self._goal.reached(self._counts)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._epoch.abandon(error)
            raise

    def _begin(self, stack: ExitStack) -> None:
        trainer, counts = self._trainer, self._counts
        self._started = time.monotonic()
        check_fit(trainer, self._goal)
        stack.enter_context(owned_folder(trainer.saver.folder, trainer.connection))
        check_choice(trainer.saver, self._how.resume)
        trainer.saver.require_writable()
        self._run_data.identify(self._data, self._how.data_name)
        self._epoch.may_be_empty = self._run_data.grows
        self._transforms.use(self._data, self._goal.eval_data)
        resumed = self._resume()
        self._transforms.require_equal(trainer.connection.main, trainer.model)
        trainer.run_progress.columns = self._transforms.columns
        trainer.setup.dense.begin()
        trainer.model.train()
        trainer.saver.begin()
        last = self._goal.steps(self._data, self._passes, counts)
        if not self._alone:  # ranks may have data of different lengths, and report together
            last = trainer.connection.main.gather_json(last)[0]
        self._reporter = Reporter(trainer, None if last is None else last - counts.start_step)
        trainer.progress.begin(counts.step, last)
        stack.callback(trainer.progress.end)
        self._announce(resumed)
        trainer.loggers.open(counts.step)
        stack.callback(trainer.loggers.close)
        if not self._has_all() and is_own_evaluate(trainer):
            trainer.evaluator.try_first(self._goal.eval_data, trainer.metrics)
        trainer.callbacks.on_fit_begin(trainer)
        self._stopping.ask_all()

    def _resume(self) -> _Resumed:
        """Continue from the newest checkpoint, or start without one."""
        trainer = self._trainer
        resumed = trainer.saver.resume(self._load_checkpoint, chosen(self._how.resume))
        if resumed is None:
            trainer.setup.update.forget()
            self._begin_alone()
        else:
            self._load(*resumed[1])
        self._transforms.match_loaders()
        self._transforms.require_fitted(trainer.model)
        return resumed

    def _announce(self, resumed: _Resumed) -> None:
        """Say where the fit starts, and why it trains nothing, if so."""
        say = self._trainer.progress.say
        show_banner(self._trainer, self._data, self._run_data.identity, resumes=resumed is not None)
        if resumed is not None:
            checkpoint, (_, other) = resumed
            say(self._run_data.announcement(checkpoint, other))
            if self._has_all():
                say(self._run_data.nothing_to_do(self._data, self._goal.text))

    def _load_checkpoint(self, checkpoint: Checkpoint) -> tuple[Mapping[str, Any], bool]:
        """Fill the tables from a checkpoint; its state, and whether it is of other data than this fit's.

        It is called again with an older one if this one is damaged.
        """
        other = self._run_data.compare(checkpoint, self._how.drop_unfinished)
        self._trainer.setup.update.forget()
        state = self._trainer.saver.load(checkpoint, self._trainer.model)
        train_state.check_fits(self._trainer.model, state, shown(checkpoint.path))
        return state, other

    def _begin_alone(self) -> None:
        """Start without a checkpoint: at 0, or after what this Trainer has trained before."""
        trainer, counts, run = self._trainer, self._counts, self._trainer.run_progress
        self._window.load_state_dict(ReportWindow().state_dict())
        if not self._how.resume:
            counts.load_state_dict(TrainingCounts().state_dict())
        if not counts.step and isinstance(self._data, Loader):
            self._data.restart()
        dataset.begin_data(counts)
        before, run.data_identity = run.data_identity, self._run_data.identity
        if counts.step and (run.data_identity is None or run.data_identity != before):
            trainer.callbacks.on_new_data(trainer)

    def _begin_epoch(self) -> None:
        for metric in self._trainer.metrics.values():
            metric.reset()
        self._trainer.callbacks.on_epoch_begin(self._trainer, self._counts.epoch)
        self._stopping.ask_all()

    def _train(self, group: list[FedBatch]) -> None:
        """One optimizer step."""
        trainer = self._trainer
        samples = self._epoch.samples(group)
        step = trainer.setup.routine.begin(group, self._epoch)
        with closing(trainer.setup.dense.attempts()) as attempts:
            for attempt in attempts:
                # Metrics see the outputs of the first attempt.
                see = trainer.count if trainer.metrics and not attempt else None
                losses = trainer.setup.routine.gradients(step, trainer.loss, trainer.metrics, see)
                if (applied := trainer.setup.routine.apply(step)) is not None:
                    break
        self._epoch.trained(group, samples)
        outcome = applied if isinstance(applied, Tensor) else bool(applied)
        self._window.add(means := losses.means(), losses.weight / step.whole_weight)
        self._note_step(samples, means, outcome, [fed.batch for fed in group])

    def _note_step(
        self, samples: int, losses: Mapping[str, Tensor], applied: bool | Tensor, batches: list[Any]
    ) -> None:
        """A step was made or skipped, and is in the counts."""
        trainer, counts = self._trainer, self._counts
        self._trained += 1
        self._unsaved = True
        activity.advance()
        if applied is not False:  # a schedule does not wait for the device
            trainer.schedule.after("step")
        self._outcomes.add(counts.step, applied, batches)
        if self._first:
            trainer.progress.step(counts.step)
        trainer.callbacks.on_step_end(trainer, StepLogs(counts.step, counts.epoch, samples, losses, applied))

    def _evaluate(self) -> None:
        self._evaluation_due = False
        self._complete_evaluation(self._evaluate_together())
        self._stopping.ask_all()
        if self._trainer.saver.keeps_best:  # so that the best checkpoint is the model that was evaluated
            self._save()

    def _evaluate_together(self) -> dict[str, float]:
        """The results of an evaluation; a collective."""
        assert self._goal.eval_data is not None
        self._trainer.setup.dense.settle()
        before = time.monotonic()
        results = self._results(self._goal.eval_data)
        self._reporter.exclude(time.monotonic() - before)
        return results

    def _results(self, data: Iterable[Any]) -> dict[str, float]:
        try:
            return self._trainer.evaluate(data)
        except Exception:
            self._trainer.saver.wait()  # what was saved before is to be complete when the program ends
            raise

    def _complete_evaluation(self, results: Mapping[str, float]) -> None:
        """An evaluation of this step has results."""
        trainer, counts = self._trainer, self._counts
        counts.evaluation = dict(results)
        if self._first:
            self._reporter.evaluation(counts.evaluation)
        counts.evaluated = counts.step
        self._unsaved = True
        self._needed_metrics.require_numbers(counts.evaluation, counts.step, trainer.evaluator.nonfinite)
        trainer.schedule.after_evaluation(counts.evaluation)
        trainer.callbacks.on_evaluate_end(trainer, counts.evaluation)

    def _save_first(self) -> None:
        if self._saves_first():
            self._save()

    def _saves_first(self) -> bool:
        """Whether to save before an evaluation: before the first, so that what was trained is not lost."""
        saves = not self._saved_first and self._unsaved and self._trainer.saver.folder is not None
        self._saved_first = True
        return saves

    def _end_epoch(self) -> None:
        trainer, counts = self._trainer, self._counts
        evaluates = self._goal.eval_data is not None and self._goal.eval_every is None
        if evaluates:  # a fit that resumes from here ends the epoch again
            self._save_first()
        trainer.schedule.after("epoch")
        if evaluates:
            self._evaluate()
        trainer.callbacks.on_epoch_end(trainer, counts.epoch)
        self._epoch.end_epoch()
        self._unsaved = True
        self._stopping.ask_all()

    def _end(self) -> FitResult:
        trainer = self._trainer
        self._outcomes.settle()
        self._reporter.training()
        if self._stopping.reason is None and self._passes.together:  # only then all have the same result
            self._outcomes.end()
        trainer.setup.dense.take()
        if self._evaluates_at_end():
            self._save_first()
            self._evaluate()
        checks = self._placement.check
        if self._alone and self._trained and isinstance(checks, SampleChecks):
            checks.require_weight()
        path = trainer.saver.finish(self._unsaved, self._snapshot)
        if self._unsaved:
            self._note_save()
        return self._finish(self._make_result(self._stopping.reason, path, self._reporter.metrics()))

    def _evaluates_at_end(self) -> bool:
        due = self._goal.eval_data is not None and self._stopping.reason is None
        return due and self._counts.evaluated != self._counts.step

    def _finish(self, result: FitResult) -> FitResult:
        """The fit has this result."""
        self._trainer.callbacks.on_fit_end(self._trainer, result)
        if self._first:
            self._reporter.end(result, self._outcomes.count)
        return result

    def _make_result(
        self, stopped: str | None, checkpoint: str | None, metrics: Mapping[str, float]
    ) -> FitResult:
        counts = self._counts
        return FitResult(
            step=counts.step,
            epoch=counts.epoch,
            samples=counts.samples,
            skipped=self._outcomes.count,
            trained=self._trained,
            seconds=time.monotonic() - self._started,
            stopped=stopped,
            checkpoint=checkpoint,
            metrics=metrics,
            evaluation=dict(counts.evaluation),
            evaluated=counts.evaluated,
        )

    def _save(self) -> None:
        if self._first:
            self._trainer.saver.save(self._snapshot())
        self._note_save()

    def _note_save(self) -> None:
        self._unsaved = False
        self._trainer.callbacks.on_checkpoint(self._trainer, self._counts.step)

    def _snapshot(self) -> Snapshot:
        trainer, counts = self._trainer, self._counts
        metrics = counts.evaluation if counts.evaluated == counts.step else None
        self._outcomes.settle()
        trainer.setup.dense.take()
        return Snapshot(counts.step, self._state(), trainer.model, metrics)

    def _state(self) -> dict[str, Any]:
        return {
            **self._trained_state(),
            **self._epoch.state(),
            **self._transforms.state(),
            "data": self._data_state(),
            "evaluation_due": self._evaluation_due,
        }

    def _data_state(self) -> dict[str, Any]:
        finished = self._finished()
        early = finished and not self._goal.reached(self._counts)
        return self._run_data.state(finished, self._goal.text, early)

    def _finished(self) -> bool:
        """Whether this data is trained enough, so that the next fit may use other data."""
        return self._has_all() or self._trainer.stop_request.final

    def _trained_state(self) -> dict[str, Any]:
        """What a checkpoint has of training."""
        return train_state.take(self._trainer)

    def _load(self, saved: Mapping[str, Any], other: bool) -> None:
        trainer, counts = self._trainer, self._counts
        counts.load_state_dict(TrainingCounts().state_dict())
        train_state.restore(trainer, saved, new_settings=self._how.new_settings)
        self._transforms.load(saved)
        evaluates = self._goal.eval_data is not None and not other
        self._evaluation_due = evaluates and bool(saved.get("evaluation_due"))
        random = train_state.random_of(trainer.connection, saved)
        if not other:
            self._load_position(saved, random)
            return
        set_random_state(random)
        self._run_data.begin()
        if not self._has_all():
            trainer.callbacks.on_new_data(trainer)

    def _load_position(self, saved: Mapping[str, Any], random: Any) -> None:
        """Continue after the batches that a checkpoint has, with these random generators."""
        if not self._run_data.grows:
            self._epoch.load_or_drop(saved, random, self._how.drop_unfinished)
            return
        # Without its position, all data since its beginning would be trained again.
        self._epoch.load(saved, random)
        if self._goal.reached(self._counts):
            dataset.begin_data(self._counts)
