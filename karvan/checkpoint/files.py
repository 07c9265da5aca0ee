"""Files of checkpoints at paths; a path that stands for a URL means an object (`job/checkpoint_url.py`).

The rest of the code reads checkpoints by these functions alone. Errors are OSErrors. Those of objects name
the URL: a FileNotFoundError for an object that is not there, a PermissionError if the store refuses the
request or does not have the bucket, which the same request will meet again, and an outage
(`karvan/errors.py`) for everything else.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from karvan.checkpoint.errors import CheckpointError
from karvan.data.errors import DataError, reason
from karvan.data.formats.paths import folders, join, resolve
from karvan.errors import is_temporary
from karvan.files import replace_file
from karvan.job.checkpoint_url import host_of, shown, split_query, url_of
from karvan.owner import FILE

# What clients of S3 and of Google's storage write for requests that will be refused again.
_REFUSED = re.compile(
    r"AWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH)|"
    r"\(HTTP status 40[13]\)|Status\((PERMISSION_DENIED|UNAUTHENTICATED)"
)
_SMALL_WRITES = "allow_delayed_open"
_WITHOUT_FOLDERS = ("s3", "gcs", "abfs")
_systems: dict[tuple[int, str], tuple[fs.FileSystem, str]] = {}


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, int]]:
    """A file to read from any position without a buffer, and its size."""
    if url_of(path) is None:
        with path.open("rb", buffering=0) as file:
            yield file, os.fstat(file.fileno()).st_size
        return
    with errors(path):
        system, inside = _find(path)
        with system.open_input_file(inside) as stream:
            yield stream, stream.size()


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    if url_of(path) is None:
        return path.read_bytes()
    with errors(path):
        system, inside = _find(path)
        with system.open_input_stream(inside) as file:
            content: bytes = file.read()
        return content


def size_of(path: Path) -> int:
    """The bytes of a file; an OSError if there is none."""
    if url_of(path) is None:
        return path.stat().st_size
    size = object_size(path)
    if size is None:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", shown(path))
    return size


def is_there(path: Path) -> bool:
    """Whether there is a file, or a folder."""
    if url_of(path) is None:
        return path.exists()
    with explained(path):
        return object_size(path) is not None or bool(listing(path))


def has_file(path: Path) -> bool:
    """Whether there is something of this name that is no folder of a URL."""
    if url_of(path) is None:
        return path.exists()
    with explained(path):
        return object_size(path) is not None


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
        return sum(item.size for item in listing(path))
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def upload(path: Path) -> None:
    """Send a file of the working folder to the URL that it stands for; does nothing for other paths."""
    if url_of(path) is not None and path.is_file():
        write_object(path, [[memoryview(path.read_bytes())]])


def fetch(path: Path) -> None:
    """Replace a file of the working folder by the object at its URL, if that is there and has more in it."""
    if url_of(path) is None:
        return
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return
    if path.exists() and path.stat().st_size >= len(content):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)


# Objects alone


class Listed(NamedTuple):
    """An object: its name below the folder that was listed, and when the store says that it was written."""

    name: str
    size: int
    written: float


def object_size(path: Path) -> int | None:
    """The bytes of an object; None if there is none."""
    with errors(path):
        system, inside = _find(path)
        info = system.get_file_info(inside)
        return int(info.size) if info.type == fs.FileType.File else None


def write_object(path: Path, pieces: Iterable[Iterable[memoryview]]) -> None:
    """Write an object, which appears when it is complete; what has its name is replaced.

    An error of `pieces` may leave a part of them.
    """
    with errors(path):
        system, inside = _find(path)
        if system.type_name not in _WITHOUT_FOLDERS:
            system.create_dir(inside.rpartition("/")[0], recursive=True)
        file = system.open_output_stream(inside)
        for group in pieces:
            for piece in group:
                file.write(piece)
        file.close()


def present(paths: list[Path]) -> list[Path]:
    """Those of some paths in one folder that are objects."""
    if not paths:
        return []
    with errors(paths[0].parent):
        systems = [_find(path) for path in paths]
        infos = systems[0][0].get_file_info([inside for _, inside in systems])
        return [path for path, info in zip(paths, infos, strict=True) if info.type == fs.FileType.File]


def folder_names(path: Path) -> list[str]:
    """The names of the folders directly below one, sorted; none if it does not exist."""
    with errors(path):
        system, inside = _find(path)
        return folders(system, inside, "*")


def listing(path: Path) -> list[Listed]:
    """All objects below a folder; none if it does not exist."""
    with errors(path):
        system, inside = _find(path)
        if isinstance(system, fs.PyFileSystem):
            system.handler.fs.invalidate_cache()  # of fsspec
        infos = system.get_file_info(fs.FileSelector(inside, recursive=True, allow_not_found=True))
        return [
            Listed(info.path[len(inside) :].lstrip("/"), info.size, (info.mtime_ns or 0) / 1e9)
            for info in infos
            if info.type == fs.FileType.File
        ]


def remove_object(path: Path) -> None:
    """Remove an object, if it is there."""
    with errors(path):
        system, inside = _find(path)
        with suppress(FileNotFoundError):
            system.delete_file(inside)


def remove_below(path: Path) -> None:
    """Remove all objects below a folder, if there are any."""
    with errors(path):
        system, inside = _find(path)
        with suppress(FileNotFoundError):
            system.delete_dir(inside)


def _find(path: Path) -> tuple[fs.FileSystem, str]:
    """The file system of a path, and the path inside of it; one file system for all paths of a host."""
    url, names = host_of(path)
    key = (os.getpid(), url)  # connections do not survive a fork
    if key not in _systems:
        system, inside = resolve(_with_small_writes(join(url, "x")))
        _systems[key] = (system, inside.removesuffix("x"))
    system, root = _systems[key]
    return system, (root + "/".join(names)) if names else root.rstrip("/")


def _with_small_writes(url: str) -> str:
    """A URL of S3 with the option by which a small object is one request, and not an upload in parts."""
    if not url.startswith("s3://") or f"{_SMALL_WRITES}=" in url:
        return url
    return f"{url}{'&' if split_query(url)[1] else '?'}{_SMALL_WRITES}=true"


@contextmanager
def errors(path: Path) -> Iterator[None]:
    """Errors of stores as OSErrors that name a URL."""
    try:
        yield
    except FileNotFoundError as error:
        if _REFUSED.search(str(error)):
            raise _refused(path, error) from error
        raise FileNotFoundError(errno.ENOENT, "there is no such object", shown(path)) from error
    except DataError as error:
        text = error.detail
        number = errno.EREMOTEIO if error.temporary else errno.EINVAL
        raise OSError(number, text, shown(path)) from error
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, PermissionError) or _REFUSED.search(str(error)):
            raise _refused(path, error) from error
        # Not EIO, which means a broken disk.
        outage = isinstance(error, OSError) and error.errno != errno.EIO and is_temporary(error)
        number = (error.errno if outage else None) or errno.EREMOTEIO
        raise OSError(number, reason(error), shown(path)) from error


def _refused(path: Path, error: BaseException) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        f"{reason(error)} (expected a bucket that exists, and credentials that may use it)",
        shown(path),
    )


# The lease of a run at a URL, as an object; see `karvan/owner.py`.


class ObjectLease:
    """The object of a run's lease."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def read(self) -> bytes | None:
        """Its content; None if there is none."""
        try:
            return read_bytes(self._path)
        except FileNotFoundError:
            return None

    def write(self, content: bytes) -> None:
        """Write or replace it."""
        write_object(self._path, [[memoryview(content)]])

    def remove(self) -> None:
        """Remove it, if it is there."""
        remove_object(self._path)


def lease_object(folder: Path) -> ObjectLease | None:
    """The lease at a URL that a path stands for; None for any other path."""
    return None if url_of(folder) is None else ObjectLease(folder)
