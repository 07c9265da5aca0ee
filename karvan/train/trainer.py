"""`Trainer`: fit, evaluate and predict, in one process or in several. The loop itself is in `fit.py`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from karvan.argument_checks import check_counts, check_integers
from karvan.checkpoint import Checkpoint, Checkpoints, find
from karvan.data import Window as DataWindow
from karvan.data import Windows
from karvan.dense.communication import DenseCommunication, DenseReduce
from karvan.embedding.optim.base import SparseOptimizer
from karvan.files import replace_file
from karvan.job.checkpoint_url import shown, url_of
from karvan.monitor.plot_page import framed, plot_page
from karvan.monitor.run_history import run_of
from karvan.notebook import Display, html_table, in_notebook
from karvan.train.assembly import make_model_setup, make_training_setup
from karvan.train.callbacks import Callback, Callbacks
from karvan.train.checks.common_mistakes import check_data, check_trainer
from karvan.train.checks.frozen import Patterns
from karvan.train.checks.label_values import SampleChecks
from karvan.train.elastic.choice import host_of, make_fit, make_predictions
from karvan.train.elastic.leased_prediction import FitHost, NoFit
from karvan.train.evaluation import Evaluator
from karvan.train.fit import Begin
from karvan.train.reporting.describe import describe, described
from karvan.train.reporting.history import History
from karvan.train.reporting.loggers import Logger, LoggerGroup
from karvan.train.reporting.progress import NoProgress, make_progress
from karvan.train.reporting.results import FitResult, ReportWindow, TrainingCounts
from karvan.train.state.dataset import remaining
from karvan.train.state.saving import SaveSettings, make_saver
from karvan.train.state.train_state import check_fits
from karvan.train.state.transforms import Transforms
from karvan.train.step.lr_schedule import Schedule, Schedulers
from karvan.train.step.optimizer_step import DenseOptimizer, OptimizerStepSettings, engines_of
from karvan.train.stopping.goal import Goal
from karvan.train.stopping.stop_request import StopRequest
from karvan.train.trainer_parts import RunProgress, TrainerParts
from karvan.train.types import Loss, MetricLike, Prediction, same

_log = logging.getLogger("karvan.train")


class Trainer:
    """Trains a model: `Trainer(model, loss, dense_optimizer=…, sparse_optimizer=kv.optim.Adagrad(lr=0.05))`.

    loss(output, batch) gives a tensor, or several by name that are summed; `karvan.train.losses` has some.
    dense_optimizer is a torch optimizer, or a function that makes one of parameters; sparse_optimizer one of
    kv.optim, which the Trainer attaches to all tables of the model unless it is attached. A Trainer that only
    evaluates and predicts needs neither.
    frozen names tables, parameters and modules that are not trained: frozen=["user", "net.*"]. Any other part
    without an optimizer is an error when a fit starts.
    metrics are gathered over the training batches of an epoch, and by copies in every evaluation.
    scheduler: see `Schedule`; it moves after each step, or after each epoch (schedule_per="epoch").
    precision: see `karvan/train/step/precision.py`. gradient_accumulation_steps, clip_norm, clip_value,
    nonfinite: see `OptimizerStepSettings`. callbacks: see `kv.callbacks`. loggers: see `kv.loggers`; they and
    progress get numbers every log_every steps. Without log_every, loggers get them every 100 steps, and
    progress also shows them after 1, 2, 5, 10, 20, 50, … steps and at least every 10 seconds. progress is
    "auto" (a bar on a terminal, otherwise lines), "bar", "plain", "none", or an object. eval_every: how many
    steps are between two evaluations of a fit that does not say it itself. checkpoints is a `kv.Checkpoints`
    or a folder; one is saved every checkpoint_every steps, every checkpoint_seconds, and at the end; with
    keep_best also after every evaluation. A save that the disk or the servers refuse is a warning; after more
    than tolerate_failed_saves in a row the fit raises the error. The last save of a fit is repeated for
    save_retry_seconds, and then raises it. device is where the model is to be, "cuda" for this rank's GPU;
    without it, where its tables are, if that is a GPU, else where it is.
    prefetch batches are taken from the data while one computes, 0 for none; on the thread that takes them,
    prepare is called with each, and embedding engines group the ids that are in it already.

    After `kv.connect("sharded")` all ranks make the same Trainer and call the same methods, each with its
    share of the data. global_accumulation_steps is the number of batches of all ranks that make a step,
    however many ranks there are. dense_reduce, average_every and find_unused_parameters: how ranks keep
    dense parameters equal, see `DenseCommunication`; a single process sends nothing. Rank 0 shows progress
    and writes logs. In mode async of
    `kv.connect("remote")` every rank makes its own steps, on dense parameters that servers hold:
    `trainer.dense.staleness` says how stale its gradients were.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        dense_optimizer: DenseOptimizer | None = None,
        sparse_optimizer: SparseOptimizer | None = None,
        frozen: Patterns = (),
        metrics: Mapping[str, MetricLike] | None = None,
        scheduler: Schedulers = None,
        schedule_per: str = "step",
        precision: str = "fp32",
        gradient_accumulation_steps: int = 1,
        global_accumulation_steps: int | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: str = "skip",
        dense_reduce: DenseReduce = "mean",
        average_every: int = 1,
        find_unused_parameters: bool = False,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Logger] = (),
        log_every: int | None = None,
        eval_every: int | None = None,
        progress: str | NoProgress = "auto",
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_seconds: float | None = 600.0,
        tolerate_failed_saves: int = 3,
        save_retry_seconds: float = 60.0,
        device: torch.device | str | None = None,
        prefetch: int = 2,
        prepare: Callable[[Any], Any] = same,
    ) -> None:
        check_integers(log_every=log_every, prefetch=prefetch)
        check_counts(1, eval_every=eval_every)
        check_trainer(
            model, loss, dense_optimizer, sparse_optimizer, metrics, callbacks, loggers, prepare, checkpoints
        )
        if log_every is not None and log_every < 1:
            raise ValueError(f"log_every must be at least 1, got {log_every}.")
        settings = OptimizerStepSettings(gradient_accumulation_steps, clip_norm, clip_value, nonfinite)
        communication = DenseCommunication(dense_reduce, average_every, find_unused_parameters)
        runs = make_model_setup(
            model,
            precision=precision,
            device=device,
            prefetch=prefetch,
            prepare=prepare,
            check=SampleChecks(loss, (metrics or {}).values()),
        )
        self.setup = make_training_setup(
            runs,
            dense_optimizer=dense_optimizer,
            sparse_optimizer=sparse_optimizer,
            frozen=frozen,
            settings=settings,
            communication=communication,
            global_accumulation_steps=global_accumulation_steps,
            must_train=False,
        )
        self.model = runs.model
        self.device = runs.device
        self.connection = runs.connection
        self.precision = runs.precision
        self.update = self.setup.update
        self.dense = self.setup.dense
        self.loss = loss
        self.metrics = dict(metrics or {})
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.nonfinite = nonfinite
        self.schedule = Schedule(scheduler, self.update.optimizers, schedule_per)
        self.callbacks = Callbacks(callbacks)
        if self.callbacks.has_averages and average_every != 1:
            raise ValueError(
                f"With average_every={average_every} ranks have different parameters, which EMA cannot "
                "average: expected average_every=1, or no EMA."
            )
        first = self.connection.rank == 0  # progress and logs are shown once, by rank 0
        self.log_every = log_every or 100
        self._shows_between = log_every is None
        self.resume_hint = "To resume, run the program again."  # commands set their own
        self.eval_every = eval_every
        self.progress = make_progress(progress if first else "none")
        self.saver = make_saver(
            checkpoints,
            SaveSettings(checkpoint_every, checkpoint_seconds, tolerate_failed_saves, save_retry_seconds),
        )
        self._history = History(self.saver.folder, writes=first)
        self.loggers = LoggerGroup([self._history, *(loggers if first else ())])
        self.evaluator = Evaluator(runs, loss, self.callbacks.averaged)
        self.run_progress = RunProgress(TrainingCounts(), ReportWindow())
        self._stop_request = StopRequest()
        self._loaded: Mapping[str, Any] | None = None  # the state of a checkpoint, once `load` was called
        self._fit_host: FitHost = NoFit()

    def __repr__(self) -> str:
        return describe(self.parts())

    def _repr_html_(self) -> str:
        return html_table("Trainer", (), described(self.parts()).items())

    def parts(self) -> TrainerParts:
        """What a fit, its reports and its checkpoints use."""
        return TrainerParts(
            setup=self.setup,
            loss=self.loss,
            metrics=self.metrics,
            schedule=self.schedule,
            callbacks=self.callbacks,
            saver=self.saver,
            evaluator=self.evaluator,
            loggers=self.loggers,
            progress=self.progress,
            log_every=self.log_every,
            shows_between=self._shows_between,
            resume_hint=self.resume_hint,
            nonfinite=self.nonfinite,
            run=self.run_progress,
            stop_request=self._stop_request,
        )

    @property
    def step(self) -> int:
        """Optimizer steps so far, including skipped ones."""
        return self.run_progress.counts.step

    @property
    def epoch(self) -> int:
        """The number of complete epochs of this data, which is the number of the current one, from 0."""
        return self.run_progress.counts.epoch

    @property
    def history(self) -> Any:
        """All reports of the run as a pandas DataFrame, a row each; `kind` is "train" or "eval".

        It includes the fits before, as far as the last `fit` has continued them. With checkpoints it is in
        `history.jsonl` of the run folder, which `karvan plot` shows.
        """
        return self._history.frame()

    def plot(self, path: str | os.PathLike[str] | None = None) -> None:
        """Show the reports of the run as charts: losses, metrics, speed and sizes.

        A notebook shows the charts below the cell. Elsewhere they become an HTML file, and its path is
        printed. The charts need no network. `karvan plot` makes the same page of one or more run folders.

        Args:
            path: The file to write. By default a notebook writes none; otherwise it is `plot.html` in the run
                folder, or in the current folder if the run has none.

        Raises:
            ValueError: There are no reports yet.

        Example:
            ```python
            trainer.fit(data)
            trainer.plot()
            ```
        """
        folder = self.saver.folder
        name = type(self.model).__name__ if folder is None else folder.name
        run = run_of(name, Path(name) if folder is None else folder, self._history.rows())
        if not run.entries:
            raise ValueError("plot expects a run with reports: call fit before, which reports its numbers.")
        if self.connection.rank != 0:
            return
        page = plot_page([run])
        if in_notebook():
            Display().show(framed(page), f"charts of {name}")
            if path is None:
                return
        if path is None:
            path = Path("plot.html") if folder is None or url_of(folder) else folder / "plot.html"
        replace_file(Path(path), page)
        print(f"{path}: 1 run, {len(run.entries):,} reports.")

    @property
    def stopping(self) -> str | None:
        """Why the fit should stop, if it should: "interrupt", "terminate", or the reason passed to `stop`."""
        return self._stop_request.reason

    def stop(self, reason: str, *, final: bool = False) -> None:
        """End the fit after the current step; callbacks call this.

        final: this data is trained enough, so the next fit may use other data. Otherwise it is unfinished.

        Several ranks stop together if one requests it: at once if that was in an evaluation or between
        epochs, otherwise after the batches that were prefetched.
        """
        self._stop_request.stop(reason, final=final)

    def fit(
        self,
        data: Iterable[Any],
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        eval_data: Iterable[Any] | None = None,
        eval_every: int | None = None,
        resume: bool | str = True,
        drop_unfinished: bool = False,
        data_name: str | None = None,
        new_settings: bool = False,
    ) -> FitResult:
        """Train on data, any iterable of batches; one iteration of it is an epoch.

        It ends after `epochs` epochs or `max_steps` optimizer steps of this data, whichever comes first;
        without either after one epoch. eval_data is evaluated every eval_every steps, or after each epoch,
        and at the end.

        resume: continue from the newest checkpoint, if there is one. If that is of the same data, its epochs
        and steps count: a fit that had reached its end does nothing, any other continues after the last
        batch. Data that has a position is moved to it; of other data the trained batches are skipped. If the
        checkpoint is of other data, which was trained to its end, training continues with the new data:
        model, optimizers, schedules and `step` as they were, epochs and max_steps from 0. Other data that
        was not trained to its end is an error, unless drop_unfinished; so is an epoch that was started with
        another kind of data (`kv.data.from_loaders()` instead of a Loader), which drop_unfinished starts
        again. resume=False refuses checkpoints, and counts steps from 0, with the model as it is. A damaged
        checkpoint is renamed to damaged-step-…, with a warning, and the newest intact one is used.
        "step-000000001000" uses that checkpoint or none; those of later steps are renamed to
        abandoned-step-….
        data_name: the name of the data in checkpoints. Loaders know which data they read; a list or a
        torch DataLoader does not, and is taken as the checkpoint's data unless it has a name.
        new_settings: a fit that resumes uses the learning rates and other settings of the optimizers that
        this program sets. Otherwise it uses the checkpoint's, and warns if they differ.
        """
        check_data("fit", data)
        if eval_data is not None:
            check_data("eval_data", eval_data)
        goal = Goal(epochs, max_steps, eval_data, self.eval_every if eval_every is None else eval_every)
        self._stop_request.begin()
        begin = Begin(resume, drop_unfinished, data_name, new_settings)
        fit = make_fit(self, self.parts(), data, goal, begin)
        result = fit.run()
        self._fit_host = host_of(fit, self._fit_host)
        return result

    def remaining(self, windows: Windows) -> Iterator[DataWindow]:
        """The windows that the run has not trained on, in order, each when it is complete.

        The first is the one that the newest checkpoint left unfinished, if it did; `fit(window.loader)`
        continues in it.
        """
        # `fit` would not continue from a damaged checkpoint, and windows would be skipped.
        resumed = self.saver.resume(Checkpoint.require_intact)
        return remaining(None if resumed is None else resumed[0], windows)

    def fit_and_evaluate(self, data: Iterable[Any], eval_data: Iterable[Any], **options: Any) -> FitResult:
        """`fit` with evaluations; the last one's metrics are the result's `evaluation`."""
        return self.fit(data, eval_data=eval_data, **options)

    def load(self, path: str | os.PathLike[str] | None = None) -> Checkpoint:
        """Load the model and its rows from a checkpoint, to evaluate and predict with them.

        By default it is the newest one of the Trainer's own folder. Feature engines of the data that is
        evaluated take their statistics from it, too. With several ranks all call it. A fit needs no load: it
        continues from the newest checkpoint anyway.
        """
        found = self.saver.latest() if path is None else find(path)
        if found is None:
            raise ValueError(
                f"load expects a checkpoint, but there is none in {shown(self.saver.folder)}."
                if self.saver.folder is not None
                else "load expects the path of a checkpoint, because this Trainer has no folder of its own."
            )
        state = found.load(self.model)
        check_fits(self.model, state, shown(found.path))
        self.model.load_state_dict(state["model"])
        self.callbacks.load_averages(state)
        self._loaded = state
        return found

    def _prepare_evaluation(self, call: str, data: Iterable[Any]) -> None:
        check_data(call, data)
        transforms = Transforms(data, columns=self.run_progress.columns)
        if self._loaded is not None:
            transforms.load(self._loaded)
        elif self.step == 0 and not any(each.step or each.state.filled for each in engines_of(self.model)):
            newest = self.saver.latest()
            if newest is not None and self.connection.rank == 0:
                _log.warning(
                    "%s uses the model as it was created, although there is %s: call trainer.load() before.",
                    call,
                    newest.path,
                )

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Losses and metrics of the model on data; nothing changes, neither rows nor counts nor modes."""
        self._prepare_evaluation("evaluate", data)
        return self.evaluator.evaluate(data, self.metrics)

    def predict(self, data: Iterable[Any], columns: Sequence[str] = ()) -> Iterator[Prediction]:
        """For each batch the model's output, on the CPU, with the requested columns of the batch.

        In a job with sharding: dynamic, trainers lease the records of `kv.data.read`: each is predicted by
        one of them. A prediction counts as done when the next one is asked for, or the iterator has ended;
        what a trainer that dies had not done is predicted by others, in the same batches. So whoever writes
        predictions does so before the next, into a file with the number of the batch,
        `prediction.records.number`, which is then written again with the same content. The iterator ends when
        all records are done, by whomever; closing it earlier leaves the rest to others.
        """
        self._prepare_evaluation("predict", data)
        if isinstance(columns, str):
            raise TypeError(f"columns expects a list of names, got {columns!r}: give it [{columns!r}].")
        return make_predictions(self.parts(), data, columns, self._fit_host)
