"""The base of a class that gets predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BasePredictionOutputsProcessor(ABC):
    """What `predict` calls with the predictions of every batch."""

    @abstractmethod
    def process(self, predictions: Any, worker_id: int) -> None:
        """Take predictions, a tensor or several by name, on the CPU."""
