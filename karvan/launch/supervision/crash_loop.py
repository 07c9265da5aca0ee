"""Detects trainers and servers that fail again and again from the same checkpoint.

Only failures of the program count. An end by a signal, or with code 75 (the environment has failed: a disk is
full, data or a server is unavailable, another rank was lost), says nothing about it; `max_restarts` bounds
those.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from karvan.job.checkpoint_url import url_of

_MOST = 3  # failures from the same checkpoint


class CrashLoopDetector:
    """Counts failures since the newest checkpoint in a folder, if there is one."""

    def __init__(self, checkpoints: Path | None) -> None:
        self._checkpoints = checkpoints
        self._newest = ""
        self._seen = False  # whether there has been a checkpoint
        self._failures = 0

    def failed(self) -> bool:
        """A trainer or a server has failed by itself; whether that was once too many."""
        newest = self._find_newest()
        self._failures = self._failures + 1 if newest == self._newest else 1
        self._newest = newest
        return self._failures >= _MOST

    def forget(self) -> None:
        """Reset the count: a process was killed, which may have caused the failures before."""
        self._failures = 0

    def state(self) -> list[str | bool | int]:
        """What was counted, for the next master."""
        return [self._newest, self._seen, self._failures]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue the count of the last master."""
        if state:
            self._newest, self._seen, self._failures = state

    @property
    def next_start(self) -> str:
        """Where trainers that are started now continue, for messages."""
        if self._checkpoints is None:
            return "continue from the newest checkpoint if they have one"
        if newest := self._find_newest():
            self._seen = True
            return f"go back to the newest checkpoint, {newest}"
        if self._seen:
            return "continue once the checkpoint folder, which had checkpoints before, is back"
        return "start from the beginning, because there is no checkpoint yet"

    def _find_newest(self) -> str:
        if self._checkpoints is None:
            return ""
        if url_of(self._checkpoints) is not None:
            return _newest_at_url(self._checkpoints)
        return max((path.name for path in self._checkpoints.glob("step-*")), default="")


def _newest_at_url(folder: Path) -> str:
    from karvan.checkpoint import CheckpointError  # imports torch
    from karvan.checkpoint.survey import step_folders

    try:
        return max((path.name for path in step_folders(folder)), default="")
    except CheckpointError:  # an outage, of which trainers have their own errors
        return ""
