"""`TrainerView`: the members of a `kv.Trainer` that callbacks use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from karvan.dense.local import LocalDense
from karvan.distributed import Connection
from karvan.train.types import Loss, MetricLike, Prediction


class TrainerView(Protocol):
    """What a callback may use of the `kv.Trainer` that calls it.

    Every `kv.Trainer` has these members; callbacks with type annotations say `trainer: TrainerView`.
    `dense.staleness` says how stale the gradients of dense parameters on servers were.
    """

    model: nn.Module
    device: torch.device
    connection: Connection
    loss: Loss
    metrics: dict[str, MetricLike]
    dense: LocalDense

    @property
    def step(self) -> int:
        """Optimizer steps so far, including skipped ones."""

    @property
    def epoch(self) -> int:
        """The number of complete epochs of this data, which is the index of the current one."""

    @property
    def history(self) -> Any:
        """All reports of the run as a pandas DataFrame."""

    @property
    def stopping(self) -> str | None:
        """Why the fit should stop, if it should."""

    def stop(self, reason: str, *, final: bool = False) -> None:
        """End the fit after the current step; final: this data is trained enough."""

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Losses and metrics of the model on data."""

    def predict(self, data: Iterable[Any], columns: Sequence[str] = ()) -> Iterator[Prediction]:
        """For each batch the model's output, and the requested columns."""
