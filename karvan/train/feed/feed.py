"""The feed: fetches the next batches in the background while the current one computes.

A thread takes a batch, moves it to the device and prepares it (`place`), and goes on until `prefetch` batches
wait. Nothing else changes: batches come in the data's order, an error comes in the place of its batch, and
each batch comes with the data's position behind it, so that what was taken ahead counts nowhere. With
`prefetch` 0 the same happens without a thread.

Where several ranks train, the thread agrees with those of the others on every batch (`rank_rounds.py`). A
request to stop then travels with a batch that nobody has begun to take: always the one `prefetch` behind the
next, so that all ranks stop at the same step, and at the same one whenever the run is repeated.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from karvan.activity import activity
from karvan.data.loading.worker_threads import start
from karvan.distributed import Connection
from karvan.train.feed.batch_source import BatchSource, FedBatch, move_back, position_of
from karvan.train.feed.rank_rounds import RankRounds, SharedTaker, never

_log = logging.getLogger("karvan.train")

_WAKE = 0.1  # seconds after which one who waits for a batch asks whether to go on
_END = 5.0  # seconds that data gets to deliver a batch that nobody wants any more


def same(batch: Any) -> Any:
    """Prepares nothing."""
    return batch


def prefetch_of(prefetch: int, connection: Connection) -> int:
    """How many batches to take ahead: as many as lookups may run ahead, unless none."""
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
) -> Feed:
    """The batches of `data` behind the first `skip`, until its end or until `stopped` says so.

    Closing the feed ends its thread. Data that knows its position is then moved back to the last batch
    that was handed out, as if nothing had been taken ahead. With `rounds`, all ranks must close it behind the
    same batch.
    """
    if rounds is not None and rounds.connection.world_size > 1:
        wait = rounds.connection.settings.timeout
        taker: BatchSource = SharedTaker(data, place, rounds)
    else:
        wait, taker = _END, BatchSource(data, place, skip)
    return AheadFeed(data, taker, stopped, prefetch, wait) if prefetch else Feed(data, taker, stopped)


class Feed(Iterator[FedBatch]):
    """Takes batches when they are asked for."""

    def __init__(self, data: Any, taker: BatchSource, stopped: Callable[[], object]) -> None:
        self._data = data
        self._taker = taker
        self._stopped = stopped
        self._last = position_of(data)
        self._closed = False
        self._abandoned = False
        self.reason: str | None = None  # why all ranks stop, known when the last batch was handed out

    def __next__(self) -> FedBatch:
        stopped = self._stopped()
        fed = None if self._closed else self._taker.next(str(stopped) if stopped else None)
        if fed is None:
            self.reason = self._taker.reason
            raise StopIteration
        self._last = fed.position
        activity.advance()
        return fed

    def close(self) -> None:
        """Nobody wants more batches."""
        if not self._closed:
            self._closed = True
            try:
                self._taker.leave()
            finally:
                self._taker.close()
            if self._taker.cut:
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
        """Something has failed on this rank: close, and do not wait for others, who may wait for this one."""
        if not self._taker.alone and not self._abandoned:
            self._abandoned = True
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        self._closed = True
        self._taker.fail(error)
        self._taker.close()


class AheadFeed(Feed):
    """Takes batches on a thread."""

    def __init__(
        self, data: Any, taker: BatchSource, stopped: Callable[[], object], prefetch: int, wait: float
    ) -> None:
        super().__init__(data, taker, stopped)
        self._size = prefetch
        self._wait = wait
        self._taken = 0
        self._given = 0
        self._changed = threading.Condition()
        self._waiting: deque[FedBatch | BaseException] = deque()
        self._complete = False  # nothing more will come
        self._stop: tuple[int, str] | None = None  # the first batch that may say so, and why to stop
        (self._thread,) = start([self._fill])

    def __next__(self) -> FedBatch:
        with self._changed:
            while not (self._waiting or self._complete or self._closed or self._stops()):
                self._changed.wait(_WAKE)  # a signal's handler cannot notify, so this one looks
            if not self._waiting or self._closed or self._stops():
                self.reason = self._taker.reason
                raise StopIteration
            item = self._waiting.popleft()
            self._given += not isinstance(item, BaseException)
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        self._last = item.position
        activity.advance()
        return item

    def close(self) -> None:
        """See `Feed.close`; the thread ends after the batch that it is taking."""
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._wait)
        if self._thread.is_alive():
            _log.warning("The data has not let go of its thread; its position is ahead of training.")
        elif self._taken > self._given or self._taker.cut:
            move_back(self._data, self._last)

    def _abandon(self, error: BaseException) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._taker.fail(error)
        self._thread.join(_END)  # no thread may be in a collective when the interpreter ends

    def _stops(self) -> bool:
        """Whether to stop here; several ranks do so when a batch says it that none has begun to take."""
        stopped = self._stopped()
        if stopped and self._stop is None:
            self._stop = (self._given + self._size, str(stopped))
        return bool(stopped) and self._taker.alone

    def _fill(self) -> None:
        """The thread: takes a batch whenever there is room."""
        try:
            while self._room() and (fed := self._taker.next(self._reason_now())) is not None:
                with self._changed:
                    self._taken += 1
                    self._waiting.append(fed)
                    self._changed.notify_all()
            if not self._abandoned:
                self._taker.leave()
        except BaseException as error:
            with self._changed:
                self._waiting.append(error)
        finally:
            self._taker.close()
            with self._changed:
                self._complete = True
                self._changed.notify_all()

    def _reason_now(self) -> str | None:
        if self._stop is None or self._taker.alone or self._taken < self._stop[0]:
            return None
        return self._stop[1]

    def _room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._size or self._closed)
            return not self._closed
