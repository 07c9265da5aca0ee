"""Logs: the numbers of a run in files."""

from karvan.train.reporting.loggers.base import Log, Logs
from karvan.train.reporting.loggers.csv import CsvLog
from karvan.train.reporting.loggers.jsonl import JsonLinesLog
from karvan.train.reporting.loggers.tensorboard import TensorBoardLog

__all__ = ["CsvLog", "JsonLinesLog", "Log", "Logs", "TensorBoardLog"]
