"""Files of checkpoints at paths; a path that stands for a URL means an object there.

The rest of the code reads checkpoints by these functions alone. Errors are OSErrors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.object_store import objects
from karvan.errors import is_temporary
from karvan.files import replace_file
from karvan.job.checkpoint_url import shown, url_of
from karvan.owner.lease import FILE


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, int]]:
    """A file to read without a buffer, and its size."""
    if url_of(path) is not None:
        with objects.opened(path) as stream:
            yield stream
        return
    with path.open("rb", buffering=0) as file:
        yield file, os.fstat(file.fileno()).st_size


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    return path.read_bytes() if url_of(path) is None else objects.read(path)


def size_of(path: Path) -> int:
    """The bytes of a file; an OSError if there is none."""
    if url_of(path) is None:
        return path.stat().st_size
    size = objects.size(path)
    if size is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", shown(path))
    return size


def is_there(path: Path) -> bool:
    """Whether there is a file, or a folder."""
    if url_of(path) is None:
        return path.exists()
    with explained(path):
        return objects.size(path) is not None or bool(objects.listing(path))


def has_file(path: Path) -> bool:
    """Whether there is something of this name that is no folder of a URL."""
    if url_of(path) is None:
        return path.exists()
    with explained(path):
        return objects.size(path) is not None


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """An OSError of a store becomes a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            path,
            f"expected a store that can be read, got '{error.strerror or error}'.",
            temporary=is_temporary(error),
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder with its parents; URLs have none."""
    if url_of(path) is None:
        path.mkdir(parents=True, exist_ok=True)


def bytes_below(path: Path) -> int:
    """The size of all files below a folder."""
    if url_of(path) is not None:
        return sum(item.size for item in objects.listing(path))
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def upload(path: Path) -> None:
    """Send a file of the working folder to the URL that it stands for; does nothing for other paths."""
    if url_of(path) is not None and path.is_file():
        objects.write(path, [[memoryview(path.read_bytes())]])


def fetch(path: Path) -> None:
    """Replace a file of the working folder by the object at its URL, if that is there and has more in it."""
    if url_of(path) is None:
        return
    try:
        content = objects.read(path)
    except FileNotFoundError:
        return
    if path.exists() and path.stat().st_size >= len(content):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


# The lease of a run at a URL, as an object; see `karvan/owner/lease.py`.


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
