"""Files that are whole at any moment, whatever is killed, and whenever a machine loses its power.

A new content is written beside its place, under a hidden name, and takes the place by a rename once its bytes
are on the disk. Without that wait, some file systems have an empty file after a loss of power.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class DamagedFileError(ValueError):
    """A file whose content is not what was written to it."""


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends; after an error nothing has changed.

    mode: the permissions of the file, as far as the umask allows them.
    """
    new = path.with_name(f".{path.name}.tmp-{os.uname().nodename}-{threading.get_native_id()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(new, flags, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Give a file another content; it has the old one or the new one at any moment."""
    with replacing(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(path: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_object(path: Path, fields: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file, a DamagedFileError if there is something else.

    fields: the types of those that the object must have; one that may be absent has `None` among its types.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        content_ = json.loads(content)
    except (ValueError, RecursionError):
        content_ = None
    if not isinstance(content_, dict):
        text = f"expected a JSON object, got {len(content)} bytes of something else"
        raise DamagedFileError(f"{path} is damaged: {text if content else 'it is empty'}.")
    for name, kind in (fields or {}).items():
        value = content_.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kind = getattr(kind, "__name__", kind)
            raise DamagedFileError(
                f"{path} is damaged: expected an object with {name!r}, {kind}, got {value!r:.40}."
            )
    return content_
