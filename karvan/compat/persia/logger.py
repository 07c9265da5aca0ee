"""`persia.logger`: loggers of the standard library with PERSIA's names."""

from __future__ import annotations

import logging
import os

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
