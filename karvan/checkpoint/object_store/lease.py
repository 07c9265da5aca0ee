"""The lease of a run at a URL, as an object; see `karvan/owner/lease_object.py`."""

from __future__ import annotations

from pathlib import Path

from karvan.checkpoint.object_store import objects
from karvan.job.checkpoint_url import url_of
from karvan.owner.lease import FILE


class ObjectLease:
    """The object of a run's lease."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def read(self) -> bytes | None:
        """Its content; None if there is none."""
        try:
            return objects.read(self._path)
        except FileNotFoundError:
            return None

    def write(self, content: bytes) -> None:
        """Write or replace it."""
        objects.write(self._path, [[memoryview(content)]])

    def remove(self) -> None:
        """Remove it, if it is there."""
        objects.remove(self._path)


def lease_object(folder: Path) -> ObjectLease | None:
    """The lease at a URL that a path stands for; None for any other path."""
    return None if url_of(folder) is None else ObjectLease(folder)
