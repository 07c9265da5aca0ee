"""`Hook`: what a Trainer calls at certain moments."""

from __future__ import annotations

from typing import Any


class Hook:
    """Does nothing at any moment; override those you need.

    | moment | when |
    |---|---|
    | `start`, `end` | around a call of train or evaluate |
    | `before_epoch`, `after_epoch` | around an epoch, or an evaluation |
    | `before_step`, `after_data` | before a forward; after_data has the batch as `data` |
    | `after_step` | after a step, with `metrics`, `global_step` and, of an evaluation, `eval_result` |
    | `out_off_data` | the data of an epoch has ended |
    | `after_train`, `after_eval` | after the steps of an epoch, or of an evaluation |
    """

    def start(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """Training or an evaluation starts."""

    def end(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """It is over."""

    def before_epoch(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """An epoch begins."""

    def after_epoch(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """An epoch is over."""

    def before_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """A batch is about to be computed."""

    def after_data(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """A batch is there."""

    def after_step(self, is_train: bool = True, *args: Any, **options: Any) -> None:
        """A step is over."""

    def out_off_data(self, *args: Any, **options: Any) -> None:
        """There is no more data."""

    def after_train(self, *args: Any, **options: Any) -> None:
        """The steps of an epoch are over."""

    def after_eval(self, *args: Any, **options: Any) -> None:
        """The steps of an evaluation are over."""
