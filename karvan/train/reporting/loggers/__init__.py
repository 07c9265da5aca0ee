"""Loggers, which write the numbers of a run to files: `loggers=[...]` of a Trainer."""

from karvan.public_names import publish
from karvan.train.reporting.loggers.base import (
    CSVLogger,
    JSONLinesLogger,
    Logger,
    LoggerGroup,
    TensorBoardLogger,
)

__all__ = ["TensorBoardLogger", "CSVLogger", "JSONLinesLogger", "Logger", "LoggerGroup"]

publish("karvan.train.reporting.loggers")
