"""`TrainingJob`: everything a run needs, for the command line and for programs that start runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from karvan.checkpoint import find, warm_start
from karvan.train.fit import check_fit
from karvan.train.reporting.results import FitResult
from karvan.train.state.transforms import Transforms
from karvan.train.step.optimizer_step import engines_of
from karvan.train.stopping import Goal
from karvan.train.trainer import Trainer


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
            self.trainer.parts(),
            Goal(self.epochs, self.max_steps, self.eval_data, self.eval_every),
        )
        self.trainer.saver.require_writable()

    def _warm_start(self, options: Mapping[str, Any]) -> None:
        # Without the dense tensors there is nothing that depends on the scale of features.
        takes_dense = options.get("dense", "*") not in ((), [])
        transforms = Transforms(self.data, self.eval_data)
        found = transforms.found if takes_dense else ()
        report = warm_start(
            self.trainer.model,
            **options,
            sparse_optimizer=self.trainer.update.sparse,
            transforms=found,
        )
        features = [
            feature
            for engine in engines_of(self.trainer.model)
            for feature, table in engine.features.items()
            if (table.name or feature) in report.tables
        ]
        transforms.require_columns(find(report.path).state(), features)
        self.trainer.progress.say(str(report))
