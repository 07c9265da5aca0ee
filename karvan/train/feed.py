"""The feed: takes the next batches from the data while the current one computes.

A thread takes a batch, moves it to the device and prepares it (`place`), and goes on until `ahead` batches
wait. Nothing else changes: batches come in the data's order, an error comes in the place of its batch, and
each batch comes with the data's position behind it, so that what was taken ahead counts nowhere. With
`ahead` 0 the same happens without a thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from karvan.data.threads import start
from karvan.train.types import Positioned

_log = logging.getLogger("karvan.train")

_WAKE = 0.1  # seconds after which one who waits for a batch asks whether to go on
_END = 5.0  # seconds that data gets to deliver a batch that nobody wants any more


@dataclass(frozen=True)
class Fed:
    """A batch that is ready, and the data's position behind it: None if data has no positions."""

    batch: Any
    position: Any


def same(batch: Any) -> Any:
    """Prepares nothing."""
    return batch


def never() -> bool:
    """Goes on."""
    return False


def feed(
    data: Iterable[Any],
    place: Callable[[Any], Any] = same,
    *,
    ahead: int = 2,
    skip: int = 0,
    stopped: Callable[[], bool] = never,
) -> Generator[Fed, None, None]:
    """The batches of `data` behind the first `skip`, until its end or until `stopped` says so.

    Closing the generator ends the thread. Data that knows its position is then moved back to the last batch
    that was handed out, as if nothing had been taken ahead.
    """
    taken = _take(data, place, skip)
    return _ahead(data, taken, ahead, stopped) if ahead else _direct(taken, stopped)


def position_of(data: Any) -> Any:
    """Where the data is, or None if it does not know."""
    try:
        return data.state_dict() if isinstance(data, Positioned) else None
    except TypeError as error:  # a Stream has the method, but cannot answer for an iterable that has none
        _log.debug("%s", error)
        return None


def _take(data: Iterable[Any], place: Callable[[Any], Any], skip: int) -> Generator[Fed, None, None]:
    batches = iter(data)
    try:
        skipped = sum(1 for _ in islice(batches, skip))
        if skipped < skip:
            raise ValueError(
                f"The data must give the {skip} batches of this epoch that were trained before, to skip "
                f"them, but ended after {skipped}: it is not the data that training began with."
            )
        for batch in batches:
            position = position_of(data)
            yield Fed(place(batch), position)
    finally:
        getattr(batches, "close", lambda: None)()


def _direct(taken: Generator[Fed, None, None], stopped: Callable[[], bool]) -> Generator[Fed, None, None]:
    try:
        while not stopped() and (fed := next(taken, None)) is not None:
            yield fed
    finally:
        taken.close()


def _ahead(
    data: Iterable[Any], taken: Generator[Fed, None, None], ahead: int, stopped: Callable[[], bool]
) -> Generator[Fed, None, None]:
    queue = _Queue(ahead)
    last = position_of(data)
    (thread,) = start([lambda: queue.fill(taken)])
    try:
        for fed in queue.drain(stopped):
            last = fed.position
            yield fed
    finally:
        queue.close()
        thread.join(_END)
        if thread.is_alive():
            _log.warning("The data has not let go of its thread; its position is ahead of training.")
        elif queue.taken > queue.given:
            move_back(data, last)


def move_back(data: Any, position: Any) -> None:
    """Move data that was left early to a position, if it has any, where those who read on find it."""
    if position is None:
        return
    try:
        data.load_state_dict(position)
    except RuntimeError as error:  # a stream cannot go back
        _log.warning("Batches that were taken ahead stay taken: %s", error)


class _Queue:
    """Batches between the thread and who trains on them."""

    def __init__(self, size: int) -> None:
        self.taken = 0
        self.given = 0
        self._size = size
        self._changed = threading.Condition()
        self._waiting: deque[Fed | BaseException] = deque()
        self._complete = False  # nothing more will come
        self._closed = False  # nothing more is wanted

    def fill(self, taken: Generator[Fed, None, None]) -> None:
        """The thread: takes a batch whenever there is room."""
        try:
            while self._room() and (fed := next(taken, None)) is not None:
                with self._changed:
                    self.taken += 1
                    self._waiting.append(fed)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._waiting.append(error)
        finally:
            taken.close()
            with self._changed:
                self._complete = True
                self._changed.notify_all()

    def drain(self, stopped: Callable[[], bool]) -> Iterator[Fed]:
        """What the thread has taken, in order."""
        while (item := self._next(stopped)) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """The thread ends after the batch that it is taking."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._size or self._closed)
            return not self._closed

    def _next(self, stopped: Callable[[], bool]) -> Fed | BaseException | None:
        with self._changed:
            while not (self._waiting or self._complete or stopped()):
                self._changed.wait(_WAKE)  # a signal's handler cannot notify, so this one looks
            if not self._waiting or stopped():
                return None
            item = self._waiting.popleft()
            self.given += not isinstance(item, BaseException)
            self._changed.notify_all()
            return item
