"""Logs: the numbers of a run in files."""

from karvan.train.logs.base import Log, Logs
from karvan.train.logs.csv import CsvLog
from karvan.train.logs.jsonl import JsonLinesLog
from karvan.train.logs.tensorboard import TensorBoardLog

__all__ = ["CsvLog", "JsonLinesLog", "Log", "Logs", "TensorBoardLog"]
