"""`Trainer`: fit, evaluate and predict, in one process or in several. The loop itself is in `fit.py`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from karvan.argument_checks import check_counts, check_integers
from karvan.checkpoint import Checkpoint, Checkpoints, find, warm_start
from karvan.data import Window as DataWindow
from karvan.data import Windows
from karvan.dense.communication import DenseCommunication, DenseReduce
from karvan.display import Display, html_table, in_notebook
from karvan.embedding.optim.base import SparseOptimizer
from karvan.files import replace_file
from karvan.job.checkpoint_url import shown, url_of
from karvan.metrics.base import set_labels
from karvan.monitor.plot_page import framed, plot_page, run_of
from karvan.train.assembly import RunProgress, TrainerParts, make_model_setup, make_training_setup
from karvan.train.callbacks import Callback, Callbacks
from karvan.train.choice import make_fit, make_predictions
from karvan.train.dataset import Transforms, remaining
from karvan.train.elastic_fit import ElasticFit
from karvan.train.evaluation import Evaluator
from karvan.train.fit import Begin, check_fit
from karvan.train.loggers import History, Logger, LoggerGroup
from karvan.train.losses import SampleChecks
from karvan.train.optimizer_step import (
    DenseOptimizer,
    OptimizerStepSettings,
    Patterns,
    Schedule,
    Schedulers,
    engines_of,
)
from karvan.train.preflight import check_data, check_trainer
from karvan.train.progress import NoProgress, make_progress
from karvan.train.reporter import described
from karvan.train.results import FitResult, ReportWindow, TrainingCounts
from karvan.train.saving import SaveSettings, make_saver
from karvan.train.stopping import Goal, StopRequest
from karvan.train.train_state import check_fits
from karvan.train.types import Loss, MetricLike, Prediction, same

_log = logging.getLogger("karvan.train")


class Trainer(TrainerParts):
    """Train, evaluate and predict with a model, in one process or in several.

    `fit` runs the loop: it computes a batch, makes a step of both optimizers, evaluates, reports, and saves
    checkpoints from which the next run continues. After `kv.connect` in several processes, all ranks make the
    same Trainer and call the same methods, each with its share of the data. Rank 0 shows progress and writes
    logs. In mode async of `kv.connect("remote")` every rank makes its own steps on dense parameters that
    servers hold; `trainer.dense.staleness` says how stale its gradients were.

    Args:
        model: A torch module. It is called with a batch.
        loss: A function of the model's output and the batch. It returns a tensor, or a mapping of tensors
            that are summed. `kv.losses` has the usual ones.
        dense_optimizer: A torch optimizer, or a function that makes one from parameters. It trains everything
            but the rows of tables. A Trainer that only evaluates and predicts needs none.
        sparse_optimizer: An optimizer of `kv.optim`. It trains the rows. The Trainer attaches it to all
            tables of the model, unless it is attached already.
        frozen: Names of tables, parameters and modules that are not trained, such as `["user", "net.*"]`. Any
            other part without an optimizer is an error when a fit starts.
        metrics: Metrics by name. They are counted over the training batches of an epoch and in every
            evaluation.
        scheduler: A function that makes a torch scheduler from an optimizer (it is called for both), a
            scheduler, or a mapping with "dense" and "sparse". A ReduceLROnPlateau moves after every
            evaluation.
        schedule_per: When schedulers move: after every "step" or after every "epoch".
        precision: "fp32", "bf16", "fp16" (only on CUDA), or "auto", which is bf16 on a CPU and fp16 on CUDA.
        gradient_accumulation_steps: How many batches make one step, by their mean gradient.
        global_accumulation_steps: How many batches of all ranks together make one step, however many ranks
            there are. It replaces `gradient_accumulation_steps`.
        clip_norm: The largest L2 norm of all dense gradients together. Sparse optimizers have limits of their
            own.
        clip_value: The largest absolute value of an element of a dense gradient. It applies before
            `clip_norm`.
        nonfinite: What happens if a gradient is infinite or NaN. "skip" skips the step, "raise" skips it and
            raises FloatingPointError, "skip_tables" skips it only for the tables that are affected if the
            dense gradients are finite, "apply" does not check.
        dense_reduce: How ranks average dense gradients: "mean"; "bf16" or "fp16", which send half the bytes;
            or "powersgd", with options if it is a `kv.train.PowerSGD`. One process sends nothing.
        average_every: 1 averages gradients in every step. Above 1, ranks make steps of their own and average
            their parameters every so many steps, which sends less.
        find_unused_parameters: Set it if parameters take no part in some batches. Torch then searches for
            them in every step, which takes time.
        callbacks: Callbacks of `kv.callbacks`, called in this order.
        loggers: Loggers of `kv.loggers`.
        log_every: How many steps are between two reports to progress and loggers. By default loggers get 50
            to 100 reports of a fit, or one every 100 steps if it is longer than 5,000 steps or its length is
            unknown. Progress also shows numbers after 1, 2, 5, 10, 20, 50, … steps and about every 10
            seconds.
        eval_every: How many steps are between two evaluations, for fits that do not say it.
        progress: "auto" (a bar on a terminal, otherwise lines), "bar", "plain", "none", or an object.
        checkpoints: A folder, or a `kv.Checkpoints`. Without it nothing is saved.
        checkpoint_every: How many steps are between two checkpoints.
        checkpoint_seconds: How many seconds are between two checkpoints; None for no limit by time. One is
            always saved at the end of a fit.
        tolerate_failed_saves: How many saves in a row may fail because of the disk or the servers. Each is a
            warning; one more is an error.
        save_retry_seconds: How long the last save of a fit is repeated before its error is raised. `fit` only
            succeeds once its final state is saved.
        device: Where the model is placed; "cuda" is this rank's GPU. By default it goes to the GPU that has
            its tables, or stays where it is.
        prefetch: How many batches are read while one is computed; 0 for none.
        prepare: A function that is called with each batch, on the thread that reads ahead.

    Raises:
        TypeError: An argument is of the wrong kind, such as a sparse optimizer as `dense_optimizer`.
        ValueError: An argument is out of range, or two of them exclude each other.

    Example:
        >>> users, items = [1, 2, 3, 1], [7, 7, 8, 8]
        >>> frame = {"user": users, "item": items, "label": [1.0, 0.0, 1.0, 1.0]}
        >>> data = kv.data.read(frame, batch_size=2)
        >>> trainer = kv.Trainer(
        ...     kv.models.DLRM([], ids=["user", "item"], dim=8),
        ...     kv.losses.BinaryCrossEntropy(label="label"),
        ...     dense_optimizer=torch.optim.Adam,
        ...     sparse_optimizer=kv.optim.Adagrad(lr=0.05),
        ...     metrics={"auc": kv.metrics.AUC()},
        ... )
        >>> trainer.fit(data, epochs=3).step
        6
        >>> sorted(trainer.evaluate(data))
        ['auc', 'loss']
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
        self.metrics = dict(metrics or {})
        set_labels(self.metrics, loss)
        if log_every is not None and log_every < 1:
            raise ValueError(f"log_every must be at least 1, got {log_every}.")
        settings = OptimizerStepSettings(gradient_accumulation_steps, clip_norm, clip_value, nonfinite)
        communication = DenseCommunication(dense_reduce, average_every, find_unused_parameters)
        check = SampleChecks(loss, self.metrics.values())
        runs = make_model_setup(model, precision, device, prefetch, prepare, check)
        self.setup = make_training_setup(
            runs,
            dense_optimizer,
            sparse_optimizer,
            frozen,
            settings,
            communication,
            global_accumulation_steps,
            must_train=False,
        )
        self.model = runs.model
        self.device = runs.device
        self.connection = runs.connection
        self.precision = runs.precision
        self.update = self.setup.update
        self.dense = self.setup.dense
        self.loss = loss
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.nonfinite = nonfinite
        self.schedule = Schedule(scheduler, self.update.optimizers, schedule_per)
        self.callbacks = Callbacks(callbacks)
        if self.callbacks.averages and average_every != 1:
            raise ValueError(
                f"With average_every={average_every} ranks have different parameters, and EMA cannot "
                "average them: expected average_every=1, or no EMA."
            )
        first = self.connection.rank == 0  # progress and logs are shown once, by rank 0
        self.log_every = log_every
        self.resume_hint = "To resume, run the program again."  # commands set their own
        self.eval_every = eval_every
        self.progress = make_progress(progress if first else "none")
        self.saver = make_saver(
            checkpoints,
            SaveSettings(checkpoint_every, checkpoint_seconds, tolerate_failed_saves, save_retry_seconds),
            self.connection,
        )
        self._history = History(self.saver.folder, writes=first)
        self.loggers = LoggerGroup([self._history, *(loggers if first else ())])
        self.evaluator = Evaluator(runs, loss, self.callbacks.averaged)
        self.run_progress = RunProgress(TrainingCounts(), ReportWindow())
        self.stop_request = StopRequest()
        self._loaded: Mapping[str, Any] | None = None  # the state of a checkpoint, once `load` was called
        self._elastic_fit: ElasticFit | None = None  # the last one, whose state those who come later need

    def __repr__(self) -> str:
        lines = [f"  {word}: {text}\n" for word, text in described(self).items()]
        return f"Trainer(\n{''.join(lines)})"

    def _repr_html_(self) -> str:
        return html_table("Trainer", (), described(self).items())

    @property
    def step(self) -> int:
        """The number of optimizer steps so far, skipped ones included."""
        return self.run_progress.counts.step

    @property
    def epoch(self) -> int:
        """The number of complete epochs of this data, which is also the index of the current one."""
        return self.run_progress.counts.epoch

    @property
    def history(self) -> Any:
        """All reports of the run as a pandas DataFrame, one row each; `kind` is "train" or "eval".

        It includes earlier fits that the last `fit` has continued. With checkpoints, the reports are also in
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
        """Why the fit is about to stop: "interrupt", "terminate", the reason passed to `stop`, or None."""
        return self.stop_request.reason

    def stop(self, reason: str, *, final: bool = False) -> None:
        """End the fit after the current step.

        Callbacks call this.

        If one rank asks for it, all ranks stop together: at once during an evaluation or between epochs,
        otherwise after the batches that were prefetched.

        Args:
            reason: A text for the result's `stopped`.
            final: Whether this data is trained enough, so that the next fit may use other data. Otherwise the
                data counts as unfinished.
        """
        self.stop_request.stop(reason, final=final)

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
        """Train on data until its epochs or steps are reached.

        Without `epochs` and `max_steps` it trains one epoch. If checkpoints are kept, it first continues from
        the newest one. Ctrl-C and SIGTERM end it after the current step, with a checkpoint.

        Data is recognised by its files or its name. If the newest checkpoint is of the same data, its epochs
        and steps count: a complete fit does nothing, any other continues after its last batch. If it is of
        other data that was trained to its end, training continues with the new data: the model, the
        optimizers, schedules and `step` stay, epochs and max_steps start from 0.

        Args:
            data: Any iterable of batches, such as a `kv.data.read(...)` or a torch DataLoader. One iteration
                is an epoch.
            epochs: After how many epochs of this data the fit ends.
            max_steps: After how many optimizer steps on this data the fit ends. With `epochs`, whichever
                comes first.
            eval_data: Data to evaluate on, every `eval_every` steps or after each epoch, and at the end.
            eval_every: How many steps are between two evaluations; by default the Trainer's `eval_every`.
            resume: True continues from the newest intact checkpoint, if there is one. "step-000000001000"
                continues from that checkpoint and sets later ones aside. False starts anew, and is an error
                if the folder has checkpoints.
            drop_unfinished: Allow other data although the last data was not trained to its end, or start an
                epoch again that was begun with another kind of data.
            data_name: The name of this data in checkpoints, for data that does not know what it reads, such
                as a list. Without a name, such data counts as the checkpoint's.
            new_settings: Whether a fit that resumes uses this program's learning rates and other optimizer
                settings. Otherwise it uses the checkpoint's, and warns if they differ.

        Returns:
            Where the fit ended, with its metrics, as a [`FitResult`][karvan.train.FitResult].

        Raises:
            ValueError: A part of the model has no optimizer, or an argument is out of range.
            CheckpointError: The checkpoint does not fit this model, or the last save has failed.
            TerminatedError: A SIGTERM has ended an earlier fit of this program.

        Example:
            >>> x = torch.randn(8, 4)
            >>> batches = [(x, x.sum(1))] * 5
            >>> trainer = kv.Trainer(
            ...     torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0)),
            ...     lambda output, batch: (output - batch["label"]).square().mean(),
            ...     dense_optimizer=torch.optim.SGD,
            ... )
            >>> result = trainer.fit(batches, epochs=2)
            >>> result.step, result.epoch, result.stopped
            (10, 2, None)
        """
        check_data("fit", data)
        if eval_data is not None:
            check_data("eval_data", eval_data)
        goal = Goal(epochs, max_steps, eval_data, self.eval_every if eval_every is None else eval_every)
        self.stop_request.begin()
        begin = Begin(resume, drop_unfinished, data_name, new_settings)
        fit = make_fit(self, data, goal, begin)
        result = fit.run()
        if isinstance(fit, ElasticFit) and fit.begun:
            self._elastic_fit = fit
        return result

    def remaining(self, windows: Windows) -> Iterator[DataWindow]:
        """Return the time windows that the run has not trained on, in order, each when it is complete.

        The first is the window that the newest checkpoint left unfinished, if there is one;
        `fit(window.loader)` continues in it.

        Args:
            windows: The windows, from `kv.data.Windows`.

        Returns:
            An iterator of windows.
        """
        # `fit` would not continue from a damaged checkpoint, and windows would be skipped.
        resumed = self.saver.resume(Checkpoint.require_intact)
        return remaining(None if resumed is None else resumed[0], windows)

    def fit_and_evaluate(self, data: Iterable[Any], eval_data: Iterable[Any], **options: Any) -> FitResult:
        """Call `fit` with evaluations.

        The last one's metrics are the result's `evaluation`.

        Args:
            data: The data to train on.
            eval_data: The data to evaluate on.
            **options: Further arguments of `fit`.

        Returns:
            The result of the fit.
        """
        return self.fit(data, eval_data=eval_data, **options)

    def load(self, path: str | os.PathLike[str] | None = None) -> Checkpoint:
        """Load the model and its rows from a checkpoint, to evaluate and predict with them.

        Feature engines of the data that is evaluated take their statistics from it, too. With several ranks
        all call it. A fit needs no load: it continues from the newest checkpoint by itself.

        Args:
            path: A checkpoint, or a run's folder for its newest one; by default the Trainer's own folder.

        Returns:
            The checkpoint that was loaded.

        Raises:
            ValueError: There is no checkpoint.
            CheckpointError: The checkpoint is damaged, or does not fit this model.
        """
        folder = self.saver.latest() if path is None else find(path)
        if folder is None:
            raise ValueError(
                f"load expects a checkpoint, but there is none in {shown(self.saver.folder)}."
                if self.saver.folder is not None
                else "load expects the path of a checkpoint, because this Trainer has no folder of its own."
            )
        state = folder.load(self.model)
        check_fits(self.model, state, shown(folder.path))
        self.model.load_state_dict(state["model"])
        self.callbacks.load_averages(state)
        self._loaded = state
        return folder

    def _prepare_evaluation(self, call: str, data: Iterable[Any]) -> None:
        check_data(call, data)
        transforms = Transforms(data, columns=self.run_progress.columns)
        if self._loaded is not None:
            transforms.load(self._loaded)
        elif self.step == 0 and not any(
            engine.step or engine.state.filled for engine in engines_of(self.model)
        ):
            newest = self.saver.latest()
            if newest is not None and self.connection.rank == 0:
                _log.warning(
                    "%s uses the model as it was created, although there is %s. To use the checkpoint, "
                    "call trainer.load() before.",
                    call,
                    newest.path,
                )

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Compute the losses and metrics of the model on data.

        Nothing changes: no row is inserted, no use is counted, modules stay in their mode.

        Args:
            data: Any iterable of batches, with labels.

        Returns:
            The mean of each loss, and each metric, by name.
        """
        self._prepare_evaluation("evaluate", data)
        return self.evaluator.evaluate(data, self.metrics)

    def predict(self, data: Iterable[Any], columns: Sequence[str] = ()) -> Iterator[Prediction]:
        """Yield the model's output for each batch, on the CPU.

        In a job with `sharding: dynamic`, trainers lease the records of `kv.data.read`, and each record is
        predicted by one of them. A prediction is done when the next one is asked for. If a trainer dies,
        others predict what it had not done, in the same batches. So write each prediction before you take the
        next, into a file named by `prediction.records.number`.

        Args:
            data: Any iterable of batches. It needs no labels.
            columns: Names of columns of the batch to return beside the output.

        Returns:
            An iterator with a [`Prediction`][karvan.train.Prediction] for each batch.

        Raises:
            TypeError: `columns` is one string instead of a list.
        """
        self._prepare_evaluation("predict", data)
        if isinstance(columns, str):
            raise TypeError(f"columns expects a list of names, got {columns!r}: give it [{columns!r}].")
        return make_predictions(self, data, columns, self._elastic_fit)


# `TrainingJob`: everything a run needs, for the command line and for programs that start runs.


@dataclass(frozen=True)
class TrainingJob:
    """A Trainer, its data, and how long it trains: what `def job()` of a file for `karvan train` returns.

    Args:
        trainer: The Trainer.
        data: The data to train on.
        eval_data: The data to evaluate on.
        epochs: After how many epochs the training ends.
        max_steps: After how many optimizer steps the training ends.
        eval_every: How many steps are between two evaluations.
        predict_columns: Columns that `karvan predict` writes with the predictions by default.
        data_name: The name of the data in checkpoints, as of `Trainer.fit`.
        warm_start: Arguments of `kv.checkpoint.warm_start`, for a run that has no checkpoint yet.

    Raises:
        TypeError: `trainer` is no Trainer, or `predict_columns` no list.

    Example:
        >>> def job():
        ...     trainer = kv.Trainer(
        ...         kv.models.DLRM([], ids=["user", "item"], dim=8),
        ...         kv.losses.BinaryCrossEntropy(label="label"),
        ...         dense_optimizer=torch.optim.Adam,
        ...         sparse_optimizer=kv.optim.Adagrad(lr=0.05),
        ...     )
        ...     frame = {"user": [1, 2], "item": [7, 8], "label": [1.0, 0.0]}
        ...     data = kv.data.read(frame, batch_size=2)
        ...     return kv.TrainingJob(trainer, data, epochs=2)
        >>> job().fit().step
        2
    """

    trainer: Trainer
    data: Iterable[Any]
    eval_data: Iterable[Any] | None = None
    epochs: int | None = None
    max_steps: int | None = None
    eval_every: int | None = None
    predict_columns: Sequence[str] = ()
    data_name: str | None = None
    warm_start: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trainer, Trainer):
            raise TypeError(f"TrainingJob expects a kv.Trainer, got {type(self.trainer).__name__}.")
        if isinstance(self.predict_columns, str):
            raise TypeError(f"TrainingJob expects predict_columns as a list, got {self.predict_columns!r}.")

    def fit(
        self,
        *,
        resume: bool | str = True,
        drop_unfinished: bool = False,
        new_settings: bool = False,
        on_new_run: Callable[[], None] = lambda: None,
    ) -> FitResult:
        """Train, after a warm start if the run has no checkpoint yet.

        Args:
            resume: As of `Trainer.fit`.
            drop_unfinished: As of `Trainer.fit`.
            new_settings: As of `Trainer.fit`.
            on_new_run: A function that is called after the warm start of a run that has no checkpoint yet.

        Returns:
            Where the fit ended.
        """
        self.check()
        if self.trainer.saver.newest_step() is None:
            if self.warm_start is not None:
                self._warm_start(self.warm_start)
            on_new_run()
        return self.trainer.fit(
            self.data,
            epochs=self.epochs,
            max_steps=self.max_steps,
            eval_data=self.eval_data,
            eval_every=self.eval_every,
            resume=resume,
            drop_unfinished=drop_unfinished,
            data_name=self.data_name,
            new_settings=new_settings,
        )

    def check(self) -> None:
        """Raise the errors of wrong settings that a fit would raise at its start.

        It does so before a pass over the data that fits features.

        Raises:
            ValueError: The fit could not start like this.
        """
        check_fit(
            self.trainer,
            Goal(self.epochs, self.max_steps, self.eval_data, self.eval_every),
        )
        self.trainer.saver.require_writable()

    def _warm_start(self, options: Mapping[str, Any]) -> None:
        # Without the dense tensors there is nothing that depends on the scale of features.
        takes_dense = options.get("dense", "*") not in ((), [])
        transforms = Transforms(self.data, self.eval_data)
        transform_names = transforms.found if takes_dense else ()
        report = warm_start(
            self.trainer.model,
            **options,
            sparse_optimizer=self.trainer.update.sparse,
            transforms=transform_names,
        )
        features = [
            feature
            for engine in engines_of(self.trainer.model)
            for feature, table in engine.features.items()
            if (table.name or feature) in report.tables
        ]
        transforms.require_columns(find(report.path).state(), features)
        self.trainer.progress.say(str(report))
