"""`RetryingSource`: a source that waits for outages to end.

A split that an outage interrupts is resumed after the last record that was handed out, so no record is lost
or read twice. Other errors are raised at once, and so is the error of an outage that lasts longer than
`retry_seconds`, marked as `temporary`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import pyarrow as pa
from typing_extensions import override

from karvan.data.errors import DataError
from karvan.data.retry.patience import Patience, is_outage
from karvan.data.source import Part, Source, Split, place_of

_DOUBTFUL = 3  # attempts after which an error that may be an outage is treated as damage

T = TypeVar("T")


class Outages(Protocol):
    """What a source's attribute `outages` is, if it has one: it knows the outages of its storage."""

    def is_outage(self, error: BaseException, path: str) -> bool | None:
        """Whether an error of reading a part is an outage; None if it is doubtful."""


class RetryingSource(Source):
    """Wraps a source. `close` ends waiting, from any thread."""

    def __init__(self, source: Source, seconds: float) -> None:
        self._source = source
        self._outages: Outages | None = getattr(source, "outages", None)
        self._patience = Patience(seconds)

    def close(self) -> None:
        """No more records are needed."""
        self._patience.end()

    @property
    @override
    def schema(self) -> pa.Schema:
        return retrying(lambda: self._source.schema, self._patience)

    @override
    def parts(self) -> list[Part]:
        return retrying(self._source.parts, self._patience)

    def place_of(self, path: str, record: int) -> str:
        """Where a record is, for errors."""
        return place_of(self._source, path, record)

    @override
    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
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
                outage = self._is_outage(error, split.path)
                if outage is False or not failure.wait(error, outage, self._patience):
                    raise

    def _is_outage(self, error: Exception, path: str) -> bool | None:
        return is_outage(error) if self._outages is None else self._outages.is_outage(error, path)


class _Failure:
    """Consecutive failures of one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._since = time.monotonic()
        self._doubtful = 0

    def wait(self, error: BaseException, outage: bool | None, patience: Patience) -> bool:
        """Wait for the next attempt; False if time is up, and then the error of an outage is temporary."""
        if not self.count:
            self._since = time.monotonic()
        self._doubtful = self._doubtful + 1 if outage is None else 0
        if self._doubtful >= _DOUBTFUL:
            return False
        self.count += 1
        waited = patience.wait(error, self.count - 1, self._since)
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
