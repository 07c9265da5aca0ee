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
from karvan.train.stopping.goal import Goal
from karvan.train.trainer import Trainer


@dataclass(frozen=True)
class TrainingJob:
    """A Trainer, its data, and how long it trains: what `def job()` of a file for `karvan train` returns.

    `epochs`, `max_steps`, `eval_data` and `eval_every` are those of `Trainer.fit`. `predict_columns` are
    the columns of the data that `karvan predict` writes with the predictions by default. `data_name` is that
    of `Trainer.fit`. `warm_start` has the arguments of `kv.checkpoint.warm_start`, with which a run starts
    that has no checkpoint yet.
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
        """Train. `on_new_run` is called after the warm start of a run that has no checkpoint yet."""
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
        """Raise what a fit would raise at its start, before a pass over the data that fits features."""
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
