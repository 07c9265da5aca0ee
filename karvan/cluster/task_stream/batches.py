"""The batches of an epoch that a trainer gets from loaders: of the tasks that it leases, or of a plan.

Several streams read at the same time, each of tasks of its own. So one batch after the other is ready, even
if a loader is slow.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

from karvan.activity import activity
from karvan.clock import clock
from karvan.cluster.task_stream.stream import ReceivedBatch, TaskStream
from karvan.data.leasing.task_records import TakenRecords
from karvan.ragged import Batch

_WAKE = 1.0  # seconds
_STOP_WITHIN = 1.0  # seconds


class LoadedBatches:
    """Iterates once over the batches of streams, until all have ended.

    in_turns: a batch of each stream in turns, so that the order is always the same; otherwise as they come.
    """

    def __init__(
        self, streams: Sequence[TaskStream], changed: threading.Condition, *, in_turns: bool
    ) -> None:
        self._streams = streams
        self._changed = changed
        self._in_turns = in_turns
        self._closed = False
        self._records: list[TakenRecords] = []
        self._failed: TaskStream | None = None

    def __iter__(self) -> Iterator[Batch]:
        count = len(self._streams)
        for number in itertools.count():
            turn = number % count
            candidates = 1 if self._in_turns else count
            taken = self._take([self._streams[(turn + each) % count] for each in range(candidates)])
            if taken is None:
                return
            activity.advance()
            self._records = taken.records
            yield taken.batch

    @property
    def idle(self) -> bool:
        """Whether a batch may take long to come, because others work on the last records of the epoch."""
        with self._changed:
            return all(stream.idle for stream in self._streams)

    def hand_over(self) -> list[TakenRecords]:
        """The records of the last batch, for whoever acknowledges them."""
        return self._records

    def suspects(self, error: Exception) -> list[TakenRecords]:
        """The records of which one may be the reason that the next batch raised this error."""
        return self._failed.suspects if self._failed is not None and self._failed.error is error else []

    def stop(self) -> None:
        """End the streams; leases stay."""
        self._closed = True
        for stream in self._streams:
            stream.close()
        due = clock.now() + _STOP_WITHIN
        for stream in self._streams:
            stream.join(max(0.0, due - clock.now()))

    def _take(self, streams: Sequence[TaskStream]) -> ReceivedBatch | None:
        """The next batch of one of these streams; None if all of them have ended."""
        with self._changed:
            while not self._closed:
                for stream in streams:
                    if stream.error is not None and not stream.ready:
                        self._failed = stream
                        raise stream.error
                for stream in streams:
                    if stream.ready:
                        taken = stream.ready.popleft()
                        self._changed.notify_all()
                        return taken
                if all(stream.ended for stream in streams):
                    return None
                self._changed.wait(_WAKE)
            return None
