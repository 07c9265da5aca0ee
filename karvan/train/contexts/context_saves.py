"""The saves of a TrainContext: failures of the storage are tolerated for a while.

The program decides when to save, so the last save of a context is the one before it is left. If that
failed, leaving the context repeats it, which gives the same checkpoint as long as nothing was trained
since; otherwise leaving raises its error.

From the first save into a folder until the context is left, the folder belongs to this process
(`karvan.owner`).
"""

from __future__ import annotations

import os
from pathlib import Path

from karvan import distributed
from karvan.checkpoint import CheckpointError, Checkpoints, Pending
from karvan.checkpoint.io.pending_save import Report, no_report
from karvan.job.checkpoint_url import local_path
from karvan.owner import Ownership
from karvan.train.state.failed_saves import FailedSaves, is_outage
from karvan.train.state.folder_owner import own_together
from karvan.train.state.saving import Snapshot


class ContextSaves:
    """Saves snapshots into folders, and counts failures for each folder."""

    def __init__(self, tolerated: int, retry_seconds: float) -> None:
        FailedSaves(tolerated, retry_seconds)  # checks them
        self._settings = (tolerated, retry_seconds)
        self._runs: dict[Path, _Run] = {}
        self._owned: dict[Path, Ownership | None] = {}
        self.training = False  # whether this process takes ownership of the folders that it saves to

    def save(
        self, folder: str | os.PathLike[str] | Checkpoints, snapshot: Snapshot, *, block: bool
    ) -> Pending:
        """Save a snapshot; it is written in the background unless `block`."""
        return self._run_of(folder).save(snapshot, block=block)

    def _run_of(self, folder: str | os.PathLike[str] | Checkpoints) -> _Run:
        named = folder.folder if isinstance(folder, Checkpoints) else folder
        path = Path(os.path.abspath(local_path(named)))
        if self.training and path not in self._owned:
            self._owned[path] = own_together(path, distributed.current())
        known = self._runs.get(path)
        if known is None or (isinstance(folder, Checkpoints) and known.checkpoints is not folder):
            made = folder if isinstance(folder, Checkpoints) else Checkpoints(path)
            self._runs[path] = _Run(made, FailedSaves(*self._settings))
        return self._runs[path]

    def wait(self) -> None:
        """Wait until everything is written; raise an error that is not tolerated."""
        for run in self._runs.values():
            run.wait()

    def release(self) -> None:
        """Release the folders."""
        self.training = False
        owned, self._owned = self._owned, {}
        for one in owned.values():
            if one is not None:
                one.release()

    def finish(self, step: int) -> None:
        """Wait, and repeat a last save that failed; `step` is the current step of training."""
        for run in self._runs.values():
            run.finish(step)


class _Run:
    """The saves into one folder."""

    def __init__(self, checkpoints: Checkpoints, failures: FailedSaves) -> None:
        self.checkpoints = checkpoints
        self._failures = failures
        self._pending: Pending | None = None
        self._snapshot: Snapshot | None = None  # of the newest save, until it is complete
        self._error: BaseException | None = None  # why that failed

    def save(self, snapshot: Snapshot, *, block: bool) -> Pending:
        self.wait()
        block = block or self._failures.is_last_chance
        pending = self._begin(snapshot, self._failures.reporter(self.checkpoints.folder))
        if block or pending.done():
            self.wait()
        return pending

    def _begin(self, snapshot: Snapshot, report: Report) -> Pending:
        step, state, model, metrics = snapshot
        self._snapshot = snapshot
        try:
            pending = self.checkpoints.save(step, state, model, metrics=metrics, report=report)
        except CheckpointError as error:
            if not is_outage(error):
                raise
            if distributed.current().rank == 0:
                report(step, error)
            pending = Pending.failed(step, error)
        self._pending = pending
        return pending

    def wait(self) -> None:
        """Wait for the save in flight; a failure that is not tolerated is raised."""
        if (error := self._settle()) is not None:
            assert self._snapshot is not None
            self._failures.failed(self._snapshot.step, self.checkpoints.folder, error)

    def _settle(self) -> BaseException | None:
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.join()
        self._error = pending.error
        if pending.error is None:
            self._failures.succeeded()
            self._snapshot = None
        pending.acknowledge()
        return pending.error

    def finish(self, step: int) -> None:
        self._settle()
        snapshot, error = self._snapshot, self._error
        if snapshot is None or error is None:
            return
        folder = self.checkpoints.folder
        if snapshot.step != step or not is_outage(error):
            raise error

        def attempt() -> BaseException | None:
            self._begin(snapshot, no_report)
            return self._settle()

        self._failures.repeat(step, folder, attempt)
