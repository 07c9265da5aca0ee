"""`Job`: everything a run needs, for the command line and for programs that make runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from karvan.train.results import FitResult
from karvan.train.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """A Trainer, its data, and how long it trains: what `def job()` of a file for `karvan train` returns.

    `epochs`, `train_steps`, `eval_data` and `eval_every` are those of `Trainer.fit`. `predict_columns` are
    the columns of the data that `karvan predict` puts beside predictions, unless it is told otherwise.
    """

    trainer: Trainer
    data: Iterable[Any]
    eval_data: Iterable[Any] | None = None
    epochs: int | None = None
    train_steps: int | None = None
    eval_every: int | None = None
    predict_columns: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.trainer, Trainer):
            raise TypeError(f"Job expects a kv.Trainer, got {type(self.trainer).__name__}.")
        if isinstance(self.predict_columns, str):
            raise TypeError(f"Job expects predict_columns as a list, got {self.predict_columns!r}.")

    def fit(self, *, resume: bool = True) -> FitResult:
        """Train."""
        return self.trainer.fit(
            self.data,
            epochs=self.epochs,
            train_steps=self.train_steps,
            eval_data=self.eval_data,
            eval_every=self.eval_every,
            resume=resume,
        )
