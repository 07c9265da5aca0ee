"""Detects trainers that fail again and again from the same checkpoint.

Only failures of the program count. An end by a signal, and one with code 75 (the place has failed: a disk is
full, data or a server is away, another rank was lost), say nothing of it; `max_restarts` bounds those.
"""

from __future__ import annotations

from pathlib import Path

_MOST = 3  # failures from the same checkpoint


class CrashLoopDetector:
    """Counts failures of trainers since the newest checkpoint in a folder, if there is one."""

    def __init__(self, checkpoints: Path | None) -> None:
        self._checkpoints = checkpoints
        self._newest = ""
        self._seen = False  # whether there has been a checkpoint
        self._failures = 0

    def failed(self) -> bool:
        """A trainer has failed by itself; whether that was once too often."""
        newest = self._find_newest()
        self._failures = self._failures + 1 if newest == self._newest else 1
        self._newest = newest
        return self._failures >= _MOST

    def forget(self) -> None:
        """Somebody was killed, so what failed before may have failed for that."""
        self._failures = 0

    @property
    def next_start(self) -> str:
        """Where trainers continue that are started now, for people."""
        if self._checkpoints is None:
            return "continue from the newest checkpoint if they have one"
        if newest := self._find_newest():
            self._seen = True
            return f"go back to the newest checkpoint, {newest}"
        if self._seen:
            return "continue once the checkpoint folder is back, which had checkpoints before"
        return "start from the beginning, because there is no checkpoint yet"

    def _find_newest(self) -> str:
        if self._checkpoints is None:
            return ""
        return max((path.name for path in self._checkpoints.glob("step-*")), default="")
