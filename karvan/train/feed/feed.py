"""The feed: fetches the next batches in the background while the current one computes.

A thread takes a batch, moves it to the device and prepares it (`place`), and continues until `prefetch`
batches wait. Nothing else changes: batches come in the data's order, an error is raised where its batch would
come, and each batch has the data's position after it, so that prefetched batches are never counted. With
`prefetch` 0 the same happens without a thread.

Where several ranks train, the thread agrees with those of the others on every batch (`rank_rounds.py`). A
request to stop then travels with a batch that no rank has started to take: always the one `prefetch` after
the next, so that all ranks stop at the same step, and at the same one whenever the run is repeated.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from typing_extensions import override

from karvan.activity import activity
from karvan.data.loading.pipeline import start
from karvan.distributed import Connection
from karvan.train.feed.rank_rounds import (
    BatchSource,
    FedBatch,
    RankBatchSource,
    RankRounds,
    Within,
    move_back,
    never,
    position_of,
)
from karvan.train.types import same

_log = logging.getLogger("karvan.train")

_WAKE = 0.1  # seconds between checks for a stop while waiting for a batch
_END = 5.0  # seconds to wait for a batch that is not needed any more


def prefetch_of(prefetch: int, connection: Connection) -> int:
    """How many batches to prefetch: at least as many as lookups may be made in advance, unless 0."""
    if prefetch < 0:
        raise ValueError(f"prefetch must not be negative, got {prefetch}.")
    return max(prefetch, connection.ahead) if prefetch else 0


def feed(
    data: Iterable[Any],
    place: Callable[[Any], Any] = same,
    *,
    prefetch: int = 2,
    skip: int = 0,
    stopped: Callable[[], object] = never,
    rounds: RankRounds | None = None,
    within: Within = nullcontext,
) -> Feed:
    """The batches of `data` after the first `skip`, until its end or until `stopped` gives a reason.

    Closing the feed ends its thread. Data that has a position is then moved back to the last batch that was
    handed out, as if nothing had been prefetched. With `rounds`, all ranks must close it after the same
    batch. Each batch is taken and placed in a context that `within` makes.
    """
    if rounds is not None and rounds.connection.world_size > 1:
        wait = rounds.connection.settings.timeout
        source: BatchSource = RankBatchSource(data, place, rounds, within)
    else:
        wait, source = _END, BatchSource(data, place, skip, within)
    return PrefetchFeed(data, source, stopped, prefetch, wait) if prefetch else Feed(data, source, stopped)


class Feed(Iterator[FedBatch]):
    """Takes batches when they are requested."""

    def __init__(self, data: Any, source: BatchSource, stopped: Callable[[], object]) -> None:
        self._data = data
        self._source = source
        self._stopped = stopped
        self._last = position_of(data)
        self._closed = False
        self._abandoned = False
        self.reason: str | None = None  # why all ranks stop, known when the last batch was handed out

    def __next__(self) -> FedBatch:
        stopped = self._stopped()
        fed = None if self._closed else self._source.next(str(stopped) if stopped else None)
        if fed is None:
            self.reason = self._source.reason
            raise StopIteration
        self._last = fed.position
        activity.advance()
        return fed

    def close(self) -> None:
        """No more batches are needed."""
        if not self._closed:
            self._closed = True
            try:
                self._source.leave()
            finally:
                self._source.close()
            if self._source.cut:
                move_back(self._data, self._last)

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and kind is not GeneratorExit:
            self.abandon(error)
        self.close()

    def abandon(self, error: BaseException) -> None:
        """This rank has failed: close without waiting for others, which may wait for this one."""
        if not self._source.alone and not self._abandoned:
            self._abandoned = True
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        self._closed = True
        self._source.fail(error)
        self._source.close()


class PrefetchFeed(Feed):
    """Takes batches in advance, on a thread."""

    def __init__(
        self, data: Any, source: BatchSource, stopped: Callable[[], object], prefetch: int, wait: float
    ) -> None:
        super().__init__(data, source, stopped)
        self._size = prefetch
        self._wait = wait
        self._taken = 0
        self._handed_out = 0
        self._changed = threading.Condition()
        self._waiting: deque[FedBatch | BaseException] = deque()
        self._complete = False  # nothing more will come
        self._stop: tuple[int, str] | None = None  # the first batch that may say so, and why to stop
        (self._thread,) = start([self._fill])

    def __next__(self) -> FedBatch:
        with self._changed:
            while not (self._waiting or self._complete or self._closed or self._stops()):
                self._changed.wait(_WAKE)  # a signal handler cannot notify, so this loop polls
            if not self._waiting or self._closed or self._stops():
                self.reason = self._source.reason
                raise StopIteration
            item = self._waiting.popleft()
            self._handed_out += not isinstance(item, BaseException)
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        self._last = item.position
        activity.advance()
        return item

    @override
    def close(self) -> None:
        """The thread ends after the batch that it is taking."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._wait)
        if self._thread.is_alive():
            _log.warning("The data has not released its thread; its position is ahead of training.")
        elif self._taken > self._handed_out or self._source.cut:
            move_back(self._data, self._last)

    def _abandon(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._source.fail(error)
        self._thread.join(_END)  # no thread may be in a collective when the interpreter ends

    def _stops(self) -> bool:
        """Whether to stop here; several ranks stop at a batch that none has started to take."""
        stopped = self._stopped()
        if stopped and self._stop is None:
            self._stop = (self._handed_out + self._size, str(stopped))
        return bool(stopped) and self._source.alone

    def _fill(self) -> None:
        """The thread: takes a batch whenever there is room."""
        try:
            while self._room() and (fed := self._source.next(self._reason_now())) is not None:
                with self._changed:
                    self._taken += 1
                    self._waiting.append(fed)
                    self._changed.notify_all()
            if not self._abandoned:
                self._source.leave()
        except BaseException as error:
            with self._changed:
                self._waiting.append(error)
        finally:
            self._source.close()
            with self._changed:
                self._complete = True
                self._changed.notify_all()

    def _reason_now(self) -> str | None:
        if self._stop is None or self._source.alone or self._taken < self._stop[0]:
            return None
        return self._stop[1]

    def _room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._size or self._closed)
            return not self._closed
