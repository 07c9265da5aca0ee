"""Data sources that are temporarily unavailable: detection of outages, and reading that continues."""

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
