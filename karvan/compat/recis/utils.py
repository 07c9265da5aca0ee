"""`Logger` and `copy_data_to_device`, which RecIS programs import."""

from __future__ import annotations

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any


class Logger:
    """A logger of a program; the methods that end with `_rank0` log on rank 0 alone."""

    def __init__(self, name: str = "karvan.compat.recis.utils.logger", level: int = logging.DEBUG) -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(level)
        self._logger.propagate = False
        if not self._logger.handlers:
            form = logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s")
            for handler, wants in ((_Stream("stdout"), True), (_Stream("stderr"), False)):
                handler.addFilter(partial(_passes, wants))
                handler.setFormatter(form)
                self._logger.addHandler(handler)

    def debug(self, *args: Any, **options: Any) -> None:
        """Log for debugging."""
        self._logger.debug(*args, **options)

    def info(self, *args: Any, **options: Any) -> None:
        """Log information."""
        self._logger.info(*args, **options)

    def warning(self, *args: Any, **options: Any) -> None:
        """Log a warning."""
        self._logger.warning(*args, **options)

    def error(self, *args: Any, **options: Any) -> None:
        """Log an error."""
        self._logger.error(*args, **options)

    def info_rank0(self, *args: Any, **options: Any) -> None:
        """Log information on rank 0."""
        if _is_first():
            self._logger.info(*args, **options)

    def warning_rank0(self, *args: Any, **options: Any) -> None:
        """Log a warning on rank 0."""
        if _is_first():
            self._logger.warning(*args, **options)

    def error_rank0(self, *args: Any, **options: Any) -> None:
        """Log an error on rank 0."""
        if _is_first():
            self._logger.error(*args, **options)


class _Stream(logging.StreamHandler[Any]):
    """Writes to what sys.stdout or sys.stderr is when it writes."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._target = name

    @property
    def stream(self) -> Any:
        return getattr(sys, self._target)


def _passes(informs: bool, record: logging.LogRecord) -> bool:
    return (record.levelno == logging.INFO) is informs


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def copy_data_to_device(data: Any, device: Any, *args: Any, **options: Any) -> Any:
    """The same lists, tuples, mappings and dataclasses with everything that has `to` on the device."""

    def copy(value: Any) -> Any:
        return copy_data_to_device(value, device, *args, **options)

    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(copy, data))
    if isinstance(data, list | tuple):
        return type(data)(map(copy, data))
    if isinstance(data, Mapping):
        copies = {name: copy(value) for name, value in data.items()}
        if isinstance(data, defaultdict):
            return defaultdict(data.default_factory, copies)
        return type(data)(copies)  # type: ignore[call-arg]
    if hasattr(data, "to"):
        return data.to(device, *args, **options)
    if is_dataclass(data) and not isinstance(data, type):
        copies = {field.name: copy(getattr(data, field.name)) for field in fields(data) if field.init}
        return replace(data, **copies)
    return data
