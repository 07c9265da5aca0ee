"""See `karvan/compat/elasticdl/python/common/log_utils.py`."""

from karvan.compat.elasticdl.python.common.log_utils import default_logger, get_logger

__all__ = ["default_logger", "get_logger"]
