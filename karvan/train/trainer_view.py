"""`TrainerView`: the members of a `kv.Trainer` that callbacks use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from karvan.dense.step_policies import LocalDense
from karvan.distributed import Connection
from karvan.train.types import Loss, MetricLike, Prediction


class TrainerView(Protocol):
    """What a callback may use of the Trainer that calls it; for type annotations.

    Every [`Trainer`][karvan.Trainer] has these members. `dense.staleness` says how stale the gradients of
    dense parameters on servers were.

    Example:
        >>> class Note(kv.callbacks.Callback):
        ...     def on_epoch_end(self, trainer: kv.callbacks.TrainerView, epoch: int):
        ...         print(epoch, trainer.step)
    """

    model: nn.Module
    device: torch.device
    connection: Connection
    loss: Loss
    metrics: dict[str, MetricLike]
    dense: LocalDense

    @property
    def step(self) -> int:
        """The number of optimizer steps so far, skipped ones included."""

    @property
    def epoch(self) -> int:
        """The number of complete epochs of this data, which is also the index of the current one."""

    @property
    def history(self) -> Any:
        """All reports of the run as a pandas DataFrame."""

    @property
    def stopping(self) -> str | None:
        """Why the fit is about to stop, or None."""

    def stop(self, reason: str, *, final: bool = False) -> None:
        """End the fit after the current step.

        Args:
            reason: A text for the result's `stopped`.
            final: Whether this data is trained enough.
        """

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Compute the losses and metrics of the model on data.

        Args:
            data: Any iterable of batches, with labels.

        Returns:
            The mean of each loss, and each metric, by name.
        """

    def predict(self, data: Iterable[Any], columns: Sequence[str] = ()) -> Iterator[Prediction]:
        """Yield the model's output for each batch.

        Args:
            data: Any iterable of batches.
            columns: Names of columns of the batch to return beside the output.

        Returns:
            An iterator with a prediction for each batch.
        """
