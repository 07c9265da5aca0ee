"""Data sources that are temporarily unavailable: detection of outages, and reading that continues."""

from karvan.data.retry.patience import RETRY_SECONDS, FileOutages, Patience, check_retry_seconds, is_outage
from karvan.data.retry.source import RetryingSource, retrying

__all__ = [
    "RETRY_SECONDS",
    "FileOutages",
    "Patience",
    "RetryingSource",
    "check_retry_seconds",
    "is_outage",
    "retrying",
]
