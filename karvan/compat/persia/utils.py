"""`persia.utils`: seeds, YAML files, free ports; and loggers of the standard library with PERSIA's names."""

from __future__ import annotations

import logging
import os
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from karvan.argument_checks import check_counts
from karvan.settings import parse


def setup_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, and have torch choose deterministic algorithms."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


def load_yaml(filepath: str) -> Any:
    """The content of a YAML file."""
    if not Path(filepath).exists():
        raise FileNotFoundError(f"Expected a YAML file, but {filepath} does not exist.")
    return parse(Path(filepath).read_text())


def dump_yaml(content: Any, filepath: str) -> None:
    """Write a YAML file."""
    Path(filepath).write_text(yaml.safe_dump(content, sort_keys=False))


def find_free_port(port: int = 10000, interval: int = 1) -> int:
    """The first port of the local machine that is free: this one, or the next ones at this interval."""
    check_counts(1, interval=interval)
    for wanted in range(port, 65536, interval):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            return wanted
    raise ValueError(f"Expected a free port from {port} to 65535, found none.")


_FORMAT = "%(asctime)s %(levelname)-8s [%(filename)s:%(lineno)d] %(message)s"
_NAME = "log"


def log_level() -> int:
    """LOG_LEVEL of the environment: trace, debug, info (the default), warn or error."""
    named = os.environ.get("LOG_LEVEL", "").strip() or "info"
    levels = {"TRACE": logging.DEBUG, **logging.getLevelNamesMapping()}
    if named.upper() not in levels:
        raise ValueError(f"LOG_LEVEL expects trace, debug, info, warn or error, got {named!r}.")
    return levels[named.upper()]


def get_logger(name: str) -> logging.Logger:
    """A logger that writes to stderr, at LOG_LEVEL of the environment (info)."""
    logger = logging.getLogger(name)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(log_level())
        logger.propagate = False
    return logger


def get_default_logger(name: str | None = None) -> logging.Logger:
    """The logger of that name."""
    return get_logger(name or _NAME)
