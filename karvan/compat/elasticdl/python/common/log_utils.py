"""The logger that models write to."""

import logging

default_logger = logging.getLogger("elasticdl")

__all__ = ["default_logger"]
