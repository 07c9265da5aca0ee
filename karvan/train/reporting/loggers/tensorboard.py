"""Scalars for TensorBoard, which is an extra: pip install 'karvan[monitor]'."""

from __future__ import annotations

import os
from typing import Any

from karvan.train.reporting.loggers.base import Logger
from karvan.train.reporting.results import Report


class TensorBoardLogger(Logger):
    """Write reports as scalars named train/loss, eval/auc, … for `tensorboard --logdir`.

    Args:
        folder: The folder of the scalars.

    Raises:
        ImportError: tensorboard is not installed: `pip install 'karvan[monitor]'`.

    Example:
        >>> logger = kv.loggers.TensorBoardLogger("tensorboard")  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger needs tensorboard: pip install 'karvan[monitor]'."
            ) from error
        self._make: Any = SummaryWriter
        self._folder = os.fspath(folder)
        self._writer: Any = None

    def open(self, step: int) -> None:
        """Start a fit; TensorBoard hides what was logged for later steps."""
        self._writer = self._make(self._folder, purge_step=step + 1 if step else None)

    def write(self, report: Report) -> None:
        """Add a scalar for each number."""
        for name, value in report.values.items():
            self._writer.add_scalar(f"{report.kind}/{name}", value, report.step)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
