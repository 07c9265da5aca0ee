"""Loggers, which write the numbers of a run to files: `loggers=[...]` of a Trainer."""

from karvan.public_names import publish
from karvan.train.reporting.loggers.base import Logger, LoggerGroup
from karvan.train.reporting.loggers.csv import CSVLogger
from karvan.train.reporting.loggers.jsonl import JSONLinesLogger
from karvan.train.reporting.loggers.tensorboard import TensorBoardLogger

__all__ = ["TensorBoardLogger", "CSVLogger", "JSONLinesLogger", "Logger", "LoggerGroup"]

publish("karvan.train.reporting.loggers")
