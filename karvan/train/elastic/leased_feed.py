"""`LeasedFeed`: takes leased batches in the background while the current one computes.

Unlike the feed of ranks with fixed shares it agrees with nobody: who has a batch takes part in the next step
with it, who has none takes part without. A trainer waits for a batch that is being read, but not for records
that others may still be working on.

An error of the data is raised as a `BatchError`, which has the records of which one may have caused it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from karvan.activity import activity
from karvan.data.leasing.leased_data import LeasedBatches
from karvan.data.leasing.record_search import blaming
from karvan.data.leasing.task_records import TakenRecords, records_done
from karvan.train.types import samples_of

_WAKE = 0.02  # seconds between two looks at whether there is no task for now


class TakenBatch(NamedTuple):
    """A batch that is ready, and the records of leased tasks in it."""

    batch: Any
    records: list[TakenRecords]
    samples: int

    @property
    def done(self) -> dict[int, int]:
        """How many records of each task are done with it, by token."""
        return records_done(self.records)


class LeasedFeed:
    """The batches that this trainer leases in one epoch, until `close`."""

    def __init__(self, loader: LeasedBatches, place: Callable[[Any], Any], prefetch: int) -> None:
        self._loader = loader
        self._place = place
        self._size = max(1, prefetch)
        self._changed = threading.Condition()
        self._ready: deque[TakenBatch] = deque()
        self._error: BaseException | None = None
        self._placing = False  # whether a batch is on its way
        self._closed = False
        self._complete = False
        self._thread = threading.Thread(target=self._fill, name="karvan-leased-feed", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether all records of the epoch are done, by whomever."""
        return self._complete and not self._ready

    def take(self, stopped: Callable[[], object]) -> TakenBatch | None:
        """The next batch; None if there is none for now, if the epoch is over, or if `stopped` says so."""
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                idle = self._loader.idle and not self._placing
                if self._complete or self._closed or stopped() or idle:
                    return None
                self._changed.wait(_WAKE)
            taken = self._ready.popleft()
            self._changed.notify_all()
        activity.advance()
        return taken

    def close(self) -> None:
        """End the thread; the leases of batches that were not taken stay with the client."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._loader.stop()
        self._thread.join()
        self._ready.clear()

    def _fill(self) -> None:
        """The thread: takes a batch whenever there is room."""
        batches = iter(self._loader)
        try:
            while True:
                with blaming(self._loader.suspects):
                    batch = next(batches, None)
                if batch is None:
                    return
                self._placing = True
                records = self._loader.hand_over()
                with blaming(records):
                    made = TakenBatch(self._place(batch), records, samples_of(batch))
                with self._changed:
                    self._ready.append(made)
                    self._placing = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._ready) < self._size or self._closed)
                    if self._closed:
                        return
        except BaseException as error:
            if not self._closed:
                self._error = error
        finally:
            with self._changed:
                self._complete = self._error is None
                self._changed.notify_all()
