"""`RetryingSource`: a source that waits for outages to end.

A split that an outage interrupts is read on behind the last record that was handed out, so no record is lost
and none comes twice. What is not an outage is raised at once, and so is an outage that lasts longer than
`retry_seconds`; its error then is `temporary`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pyarrow as pa

from karvan.data.errors import DataError
from karvan.data.retry.patience import Patience
from karvan.data.retry.place import FilePlace, is_away
from karvan.data.source import Part, Source, Split

_DOUBTFUL = 3  # attempts after which an error that may be an outage is taken as damage

T = TypeVar("T")


class RetryingSource:
    """A source like another one. `close` ends waiting, from any thread."""

    def __init__(self, source: Source, seconds: float) -> None:
        self._source = source
        self._place: FilePlace | None = getattr(source, "place", None)
        self._patience = Patience(seconds)

    def close(self) -> None:
        """Nobody wants records any more."""
        self._patience.end()

    @property
    def schema(self) -> pa.Schema:
        """See `Source.schema`."""
        return retrying(lambda: self._source.schema, self._patience)

    def parts(self) -> list[Part]:
        """See `Source.parts`."""
        return retrying(self._source.parts, self._patience)

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """See `Source.read`."""
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
                away = self._is_away(error, split.path)
                if away is False or not failure.repeats(error, away, self._patience):
                    raise

    def _is_away(self, error: Exception, path: str) -> bool | None:
        return is_away(error) if self._place is None else self._place.is_away(error, path)


class _Failure:
    """Failures in a row of one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._since = time.monotonic()
        self._doubtful = 0

    def repeats(self, error: BaseException, away: bool | None, patience: Patience) -> bool:
        """Wait, unless it has been too long; the last failure of a place that is away is temporary."""
        if not self.count:
            self._since = time.monotonic()
        self._doubtful = self._doubtful + 1 if away is None else 0
        if self._doubtful >= _DOUBTFUL:
            return False
        self.count += 1
        waited = patience.wait(error, self.count - 1, self._since)
        if not waited and isinstance(error, DataError):
            error.temporary = True
        return waited


def retrying(work: Callable[[], T], patience: Patience) -> T:
    """What work gives; it is repeated while errors say that a place is away."""
    failure = _Failure()
    while True:
        try:
            made = work()
        except Exception as error:
            if not is_away(error) or not failure.repeats(error, True, patience):
                raise
        else:
            if failure.count:
                patience.succeeded()
            return made
