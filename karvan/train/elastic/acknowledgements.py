"""`Acknowledgements`: tells the master which records committed steps contain, behind the steps.

All trainers know the records of every step, and the first one of the round reports them. Until the master has
confirmed them, the others remember them, too: whoever becomes the first reports what the one before may not
have reported. Numbers of records only grow, so a report may come twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from karvan.data.leasing.client import WorkClient


class Acknowledgements:
    """The records of steps that are committed and may not be acknowledged yet."""

    def __init__(self, client: WorkClient) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._steps: dict[int, dict[int, int]] = {}  # records by token, by step
        self._error: BaseException | None = None
        self._reports = False
        self._busy = False
        self._closed = False
        self._confirmed = 0
        self._thread = threading.Thread(target=self._run, name="karvan-acknowledge", daemon=True)
        self._thread.start()

    @property
    def confirmed(self) -> int:
        """The last step whose records the master knows, as far as this trainer has reported them."""
        return self._confirmed

    def add(self, step: int, records: Mapping[int, int], *, report: bool) -> None:
        """A step is committed. report: whether it is this trainer that reports."""
        with self._changed:
            self._raise()
            self._steps[step] = dict(records)
            self._reports = report
            self._changed.notify_all()

    def forget(self, step: int) -> None:
        """The master knows the records of all steps up to this one."""
        with self._changed:
            self._steps = {each: records for each, records in self._steps.items() if each > step}

    def flush(self) -> None:
        """Report everything now; returns when the master has confirmed it."""
        with self._changed:
            self._reports = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not (self._steps or self._busy))
            self._raise()

    def close(self) -> None:
        """End the thread, without reporting any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or (self._steps and self._reports))
                    if self._closed:
                        return
                    taken, self._steps = self._steps, {}
                    self._busy = True
                done: dict[int, int] = {}
                for step in sorted(taken):
                    done |= taken[step]
                self._client.acknowledge(done)
                self._confirmed = max(taken)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._busy = False
                self._changed.notify_all()
