"""Data sources that are away for a while: what is an outage, and reading that continues after one."""

from karvan.data.retry.patience import RETRY_SECONDS, Patience, check_retry_seconds
from karvan.data.retry.place import FilePlace, is_away
from karvan.data.retry.source import RetryingSource, retrying

__all__ = [
    "RETRY_SECONDS",
    "FilePlace",
    "Patience",
    "RetryingSource",
    "check_retry_seconds",
    "is_away",
    "retrying",
]
