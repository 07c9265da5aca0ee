"""The logger that models write to."""

import logging

default_logger = logging.getLogger("elasticdl")


def get_logger(
    name: str, level: str | int = "INFO", handlers: list[logging.Handler] | None = None
) -> logging.Logger:
    """A logger of this name and level, with these handlers."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    for handler in handlers or ():
        logger.addHandler(handler)
    return logger


__all__ = ["default_logger", "get_logger"]
