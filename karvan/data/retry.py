"""Data sources that are temporarily unavailable: detection of outages, and reading that continues."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol, TypeVar

import pyarrow as pa

from karvan.activity import activity
from karvan.data.errors import DataError
from karvan.data.formats.paths import Files
from karvan.data.source import Source, Split
from karvan.errors import is_temporary

# `Patience`: how long readers wait for an outage to end, with which pauses, and what is logged.
#
# The first failure is logged as a warning at once, then one warning follows every half minute, however many
# threads are affected, and one when the outage is over. Pauses double from a tenth of a second up to five
# seconds.


_log = logging.getLogger("karvan.data")

RETRY_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_WARN_EVERY = 30.0


def check_retry_seconds(seconds: float) -> float:
    """The same number; a ValueError unless it is 0 or more, and finite."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"retry_seconds must be a number of seconds, got {seconds!r}.")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"retry_seconds must be 0 or more, got {seconds}.")
    return float(seconds)


class Patience:
    """The outages of one source. Threads may share it; each counts its own time from its first failure."""

    def __init__(self, seconds: float = RETRY_SECONDS) -> None:
        self.seconds = check_retry_seconds(seconds)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._since: float | None = None  # when the current outage started
        self._warned = -math.inf

    def end(self) -> None:
        """The data is no longer needed: threads that wait give up."""
        self._ended.set()

    def pause(self, error: BaseException, seconds: float) -> bool:
        """Wait after an error, and warn from time to time; False if nobody needs the data any more."""
        if self._ended.is_set():
            return False
        now = time.monotonic()
        with self._lock:
            self._since = now if self._since is None else self._since
            warns = now >= self._warned + _WARN_EVERY  # also if the source fails again and again
            if warns:
                self._warned = now
        if warns:
            text = str(error).strip() or type(error).__name__
            sentence = text if text.endswith(".") else f"{text}."
            _log.warning("%s Retrying for up to %g seconds.", sentence, self.seconds)
        activity.advance()  # waiting is not a stall, since it is limited
        return not self._ended.wait(seconds)

    def succeeded(self) -> None:
        """Something was read after a failure."""
        with self._lock:
            since, self._since = self._since, None
            was_reported = since is not None and self._warned >= since
        if since is not None and was_reported:
            _log.warning("Data can be read again, after %.0f seconds.", time.monotonic() - since)


# Decides whether files cannot be read because of an outage or because they are damaged.
#
# Errors of local disks and of connections have numbers or classes that identify outages. Clients of object
# stores raise a plain OSError with a text, as decoders do for damaged bytes: a few texts are known, and for
# the others one byte of the file is read. If that fails, it is an outage; otherwise the error is *doubtful*,
# and if it occurs twice more, it is treated as damage.
#
# A local file that no longer exists is missing, unless the file system that it was on has been unmounted:
# then the nearest existing folder is on another device than the file's folder was.


# Texts of the clients of S3, Google Cloud Storage and HDFS.
_OUTAGE = re.compile(
    r"NETWORK_CONNECTION|SLOW_DOWN|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT|THROTTLING|curlCode"
    r"|UNAVAILABLE|DEADLINE_EXCEEDED|[Tt]imed? ?out|[Cc]onnection (refused|reset|closed|aborted)"
    r"|[Cc]ouldn.t connect|[Cc]ould not connect"
)
_IN_PYTHON = "Detail: Python exception"  # how Arrow reports an error that a file system of fsspec has raised
# Clients that raise their own classes of errors.
_CLIENTS = ("aiohttp", "azure", "botocore", "google", "paramiko", "requests", "urllib3")


def is_outage(error: BaseException) -> bool:
    """Whether the error alone shows that the storage cannot be reached."""
    if is_temporary(error):
        return True
    return any(_has_outage_text(cause) for cause in _causes(error))


class FileOutages:
    """Recognizes outages of the storage of some files."""

    def __init__(self, files: Files) -> None:
        self._filesystem = files.filesystem
        self._local = files.filesystem.type_name == "local"
        self._devices: dict[str, int] = {}
        if self._local:
            for folder in {os.path.dirname(os.path.abspath(path)) for path in files.paths}:
                with suppress(OSError):
                    self._devices[folder] = os.stat(folder).st_dev

    def is_outage(self, error: BaseException, path: str) -> bool | None:
        """Whether an error of reading a file is an outage; None if it is doubtful."""
        if is_outage(error):
            return True
        if self._local:
            return _is_missing(error) and (self._is_unmounted(path) or _is_back(error, path))
        for cause in _causes(error):
            if _is_plain(cause) or type(cause).__module__.partition(".")[0] in _CLIENTS:
                return None if self._can_be_read(path) else True
        return False

    def _can_be_read(self, path: str) -> bool:
        try:
            with self._filesystem.open_input_file(path) as file:
                return bool(file.read(1))
        except FileNotFoundError:
            return True  # the file system answers; the next attempt reports what is missing
        except Exception:
            return False

    def _is_unmounted(self, path: str) -> bool:
        folder = os.path.dirname(os.path.abspath(path))
        device = self._devices.get(folder)
        while device is not None:
            try:
                return os.stat(folder).st_dev != device
            except FileNotFoundError:
                folder = os.path.dirname(folder)
            except OSError as error:
                return is_temporary(error)
        return False


def _is_back(error: BaseException, path: str) -> bool:
    """Whether a file that could not be found is there again: its disk was mounted meanwhile."""
    missing = any(isinstance(cause, FileNotFoundError) and path in str(cause) for cause in _causes(error))
    return missing and os.path.exists(path)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _has_outage_text(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, OSError | pa.ArrowException) and _IN_PYTHON in text:
        return "FileNotFoundError" not in text
    return _is_plain(error) and _OUTAGE.search(text) is not None


def _is_plain(error: BaseException) -> bool:
    return type(error) is OSError and error.errno is None


def _is_missing(error: BaseException) -> bool:
    causes = (cause for cause in _causes(error) if isinstance(cause, FileNotFoundError | DataError))
    return any(isinstance(cause, FileNotFoundError) or "no such file" in str(cause) for cause in causes)


# `RetryingSource`: a source that waits for outages to end.
#
# A split that an outage interrupts is resumed after the last record that was handed out, so no record is lost
# or read twice. Other errors are raised at once, and so is the error of an outage that lasts longer than
# `retry_seconds`, marked as `temporary`.


_DOUBTFUL = 3  # attempts after which an error that may be an outage is treated as damage

T = TypeVar("T")


class Outages(Protocol):
    """What a source's attribute `outages` is, if it has one: it knows the outages of its storage."""

    def is_outage(self, error: BaseException, path: str) -> bool | None:
        """Whether an error of reading a part is an outage; None if it is doubtful."""


class RetryingSource:
    """Reads a source. `close` ends waiting, from any thread."""

    def __init__(self, source: Source, seconds: float) -> None:
        self._source = source
        self._outages: Outages | None = getattr(source, "outages", None)
        self._patience = Patience(seconds)

    def close(self) -> None:
        """No more records are needed."""
        self._patience.end()

    @property
    def schema(self) -> pa.Schema:
        """The columns of the source."""
        return retrying(lambda: self._source.schema, self._patience)

    def place_of(self, path: str, record: int) -> str:
        """Where a record is, for errors."""
        find = getattr(self._source, "place_of", None)  # a source may say more
        return f"record {record}" if find is None else str(find(path, record))

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The records of a split; after an outage, from the first one that has not been handed out."""
        done = 0
        failure = _Failure()
        while True:
            try:
                for batch in self._source.read(Split(split.path, split.first + done, split.count - done)):
                    if failure.count:
                        self._patience.succeeded()
                        failure = _Failure()
                    done += len(batch)
                    yield batch
                return
            except Exception as error:
                outages = self._outages
                outage = is_outage(error) if outages is None else outages.is_outage(error, split.path)
                if outage is False or not failure.wait(error, outage, self._patience):
                    raise


class _Failure:
    """Consecutive failures of one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._since = time.monotonic()
        self._doubtful = 0

    def wait(self, error: BaseException, outage: bool | None, patience: Patience) -> bool:
        """Wait for the next attempt; False if time is up, and then the error of an outage is temporary."""
        now = time.monotonic()
        if not self.count:
            self._since = now
        self._doubtful = self._doubtful + 1 if outage is None else 0
        if self._doubtful >= _DOUBTFUL:
            return False
        self.count += 1
        remaining = self._since + patience.seconds - now
        pause = min(_FIRST_PAUSE * 2.0 ** min(self.count - 1, 20), _LONGEST_PAUSE, remaining)
        waited = remaining > 0 and patience.pause(error, pause)
        if not waited and isinstance(error, DataError):
            error.temporary = True
        return waited


def retrying(work: Callable[[], T], patience: Patience) -> T:
    """The result of `work`, which is repeated during an outage."""
    failure = _Failure()
    while True:
        try:
            result = work()
        except Exception as error:
            if not is_outage(error) or not failure.wait(error, True, patience):
                raise
        else:
            if failure.count:
                patience.succeeded()
            return result
