"""Objects at URLs, by the paths that stand for them (`karvan/job/checkpoint_url.py`).

Errors are OSErrors that name the URL: a FileNotFoundError for an object that is not there, a PermissionError
if the store refuses the request or does not have the bucket, which the same request will meet again, and an
outage (`karvan/errors.py`) for everything else.
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

from karvan.data.errors import DataError, reason
from karvan.data.formats.paths import folders, join, resolve
from karvan.errors import is_temporary
from karvan.job.checkpoint_url import host_of, shown, split_query

# What clients of S3 and of Google's storage write for requests that will be refused again.
_REFUSED = re.compile(
    r"AWS Error (ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH)|"
    r"\(HTTP status 40[13]\)|Status\((PERMISSION_DENIED|UNAUTHENTICATED)"
)
_SMALL_WRITES = "allow_delayed_open"
_WITHOUT_FOLDERS = ("s3", "gcs", "abfs")
_systems: dict[tuple[int, str], tuple[fs.FileSystem, str]] = {}


class Listed(NamedTuple):
    """An object: its name below the folder that was listed, and when the store says that it was written."""

    name: str
    size: int
    written: float


def read(path: Path) -> bytes:
    """The content of an object."""
    with errors(path):
        system, inside = _find(path)
        with system.open_input_stream(inside) as file:
            content: bytes = file.read()
        return content


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, int]]:
    """An object to read from any position, and its size."""
    with errors(path):
        system, inside = _find(path)
        with system.open_input_file(inside) as file:
            yield file, file.size()


def write(path: Path, pieces: Iterable[Iterable[memoryview]]) -> None:
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


def size(path: Path) -> int | None:
    """The bytes of an object; None if there is none."""
    with errors(path):
        system, inside = _find(path)
        info = system.get_file_info(inside)
        return int(info.size) if info.type == fs.FileType.File else None


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


def remove(path: Path) -> None:
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
