"""Finds the files of a path: a file, a folder, a glob, a URL of any file system, or a list of them.

Folders are read recursively, in sorted order. Names that begin with "_" or "." are skipped inside of
folders and globs, because other programs use them for markers (`_SUCCESS`) and unfinished files; a file whose
path is given in full is always read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow import fs

from karvan.data.errors import DataError, located, reason
from karvan.errors import is_temporary
from karvan.job.checkpoint_url import split_query

# Lists folders of any file system.
#
# fsspec's own walk skips folders that it cannot list, so a store that fails for a moment would seem to have
# fewer files, and records would be lost silently. Here its folders are listed one by one,
# and a folder that cannot be listed is an error.


def list_folder(
    system: fs.FileSystem, folder: str, *, recursive: bool = False, missing_ok: bool = False
) -> list[fs.FileInfo]:
    """Files and folders inside of a folder; missing_ok: an empty list if the folder does not exist."""
    if isinstance(system, fs.PyFileSystem) and isinstance(system.handler, fs.FSSpecHandler):
        return _list_fsspec(system.handler.fs, folder, recursive, missing_ok)
    infos: list[fs.FileInfo] = system.get_file_info(
        fs.FileSelector(folder, recursive=recursive, allow_not_found=missing_ok)
    )
    return infos


def _list_fsspec(files: Any, folder: str, recursive: bool, missing_ok: bool) -> list[fs.FileInfo]:
    infos: list[fs.FileInfo] = []
    waiting = [folder]
    while waiting:
        inside = waiting.pop()
        try:
            entries = files.ls(inside, detail=True)
        except FileNotFoundError:
            if missing_ok or inside != folder:  # it has just been removed
                continue
            raise
        for entry in entries:
            name, is_folder = str(entry["name"]), entry["type"] == "directory"
            if name.strip("/") == inside.strip("/"):
                continue  # some stores have an object for the folder itself
            kind = fs.FileType.Directory if is_folder else fs.FileType.File
            infos.append(fs.FileInfo(name.rstrip("/"), type=kind, size=entry.get("size") or 0))
            if is_folder and recursive:
                waiting.append(name)
    return infos


PathLike = str | os.PathLike[str]

_OF_PYARROW = ("file", "s3", "gs", "gcs", "hdfs", "viewfs")
_GOOGLE_RETRY_SECONDS = 30  # by default, Google's client retries for 15 minutes
_HINTS = dict.fromkeys(
    ("hdfs", "viewfs"), ". It needs Java and Hadoop: set JAVA_HOME, HADOOP_HOME and CLASSPATH to them."
)


@dataclass(frozen=True)
class Files:
    """Files of one file system, in the order in which they are read.

    `below` has the part of each path that was found by listing: what follows a given folder, or starts with a
    glob.
    """

    filesystem: fs.FileSystem
    paths: tuple[str, ...]
    below: tuple[str, ...]


def find(paths: PathLike | Iterable[PathLike], filesystem: fs.FileSystem | None = None) -> Files:
    """The files that `paths` means; finding none, or one of them twice, is an error.

    `filesystem` is a `pyarrow.fs.FileSystem` or an fsspec file system for paths without a scheme.
    """
    requested = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    matches: list[str] = []
    below: list[str] = []
    chosen: fs.FileSystem | None = None
    for pattern in requested:
        text = os.fspath(pattern)
        system, inside = resolve(text, filesystem)
        if chosen is not None and not system.equals(chosen):
            raise DataError("All files of one source must be on one file system.", path=text)
        chosen = system
        with located(text):
            expanded = _expand(system, inside)
        if not expanded:
            raise DataError("There is no such file, and no file inside of such a folder.", path=text)
        matches += expanded
        below += [path[_fixed(inside, path) :].lstrip("/") for path in expanded]
    if chosen is None:
        raise DataError("At least one path is needed, but there are none.")
    unique: set[str] = set()
    for path in matches:
        if path in unique:
            raise DataError("The file is named twice, so its records would be read twice.", path=path)
        unique.add(path)
    return Files(chosen, tuple(matches), tuple(below))


def resolve(path: PathLike, filesystem: fs.FileSystem | None = None) -> tuple[fs.FileSystem, str]:
    """The file system of a path or URL, and the path inside of it."""
    text = os.fspath(path)
    if filesystem is not None:
        if not isinstance(filesystem, fs.FileSystem):
            filesystem = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        return filesystem, text
    if "://" not in text:
        return fs.LocalFileSystem(), str(Path(text).expanduser())
    text, query = split_query(text)
    scheme = text.partition("://")[0]
    if scheme in ("gs", "gcs") and "retry_limit_seconds=" not in query:
        query = f"{query}&" if query else "?"
        query += f"retry_limit_seconds={_GOOGLE_RETRY_SECONDS}"
    # Globs hold characters that are not allowed in URLs, so only the part before them is parsed.
    fixed = text[: _glob_start(text)]
    cut = len(text) if fixed == text else max(fixed.rfind("/") + 1, fixed.find("://") + 3)
    head, tail = text[:cut] + query, text[cut:]
    try:
        system, inside = fs.FileSystem.from_uri(head)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if scheme in _OF_PYARROW and isinstance(error, pa.ArrowInvalid):
            raise DataError(f"The URL cannot be read: {reason(error)}", path=text) from error
        system, inside = _fsspec(text, head)
    except OSError as error:
        hint = _HINTS.get(scheme, "")
        raise DataError(
            f"The file system cannot be opened: {reason(error)}{hint}",
            path=text,
            temporary=is_temporary(error),
        ) from error
    return system, f"{inside.rstrip('/')}/{tail}" if tail else inside


def join(path: str, name: str) -> str:
    """A path or URL inside of a folder; options of a file system stay at the end."""
    text, query = split_query(path)
    return f"{text.rstrip('/')}/{name}{query}"


def folders(system: fs.FileSystem, root: str, pattern: str) -> list[str]:
    """Folders below `root` that match a glob, sorted, relative to the root; listed again on each call."""
    if isinstance(system, fs.PyFileSystem):
        system.handler.fs.invalidate_cache()  # of fsspec
    listing = _Listing(system)
    segments = [""]
    for segment in pattern.strip("/").split("/"):
        fits = re.compile(translate(segment))
        segments = [
            f"{above}/{name}"
            for above in segments
            for name, is_folder in listing.inside(root + above)
            if is_folder and fits.fullmatch(name)
        ]
    return sorted(path[1:] for path in segments)


def exists(system: fs.FileSystem, path: str) -> bool:
    """Whether there is a file."""
    return bool(system.get_file_info(path).type == fs.FileType.File)


class _Listing:
    """The direct contents of folders.

    Google's storage has objects and no folders, and pyarrow lists only those folders for which a writer has
    created an object. So there, everything below the first requested folder is listed at once, and the
    folders are taken from the objects' names.
    """

    def __init__(self, system: fs.FileSystem) -> None:
        self._system = system
        self._below: dict[str, set[tuple[str, bool]]] = {}

    def inside(self, folder: str) -> Iterable[tuple[str, bool]]:
        """Names, and whether each is a folder; nothing for a folder that does not exist."""
        if self._system.type_name != "gcs":
            listed = list_folder(self._system, folder, missing_ok=True)
            return [(info.base_name, info.type == fs.FileType.Directory) for info in listed]
        if folder not in self._below:
            self._below[folder] = set()
            for info in self._system.get_file_info(
                fs.FileSelector(folder, allow_not_found=True, recursive=True)
            ):
                self._add(folder, info.path, info.type == fs.FileType.Directory)
        return self._below[folder]

    def _add(self, root: str, path: str, is_folder: bool) -> None:
        above, _, name = path.rpartition("/")
        inside = self._below.setdefault(above, set())
        if (name, is_folder) not in inside:
            inside.add((name, is_folder))
            if above != root:
                self._add(root, above, True)


def _fsspec(text: str, head: str) -> tuple[fs.FileSystem, str]:
    try:
        system, inside = fsspec.core.url_to_fs(head)
    except (ImportError, ValueError, OSError) as error:
        raise DataError(
            f"The file system cannot be opened: {reason(error)}", path=text, temporary=is_temporary(error)
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(system)), str(inside)


def _fixed(request: str, path: str) -> int:
    """The length of the part of a path that was given: a file's folder, a folder, or up to a glob."""
    if request == path:
        return path.rfind("/") + 1
    start = _glob_start(request)
    return start if start == len(request) else request.rfind("/", 0, start) + 1


def _expand(system: fs.FileSystem, path: str) -> list[str]:
    exists = system.get_file_info(path).type in (fs.FileType.File, fs.FileType.Directory)
    if exists or _glob_start(path) == len(path):
        return list(_match(system, _Listing(system), path, []))
    return sorted(set(_match(system, _Listing(system), "", path.split("/"))))


def _glob_start(path: str) -> int:
    """Where the first mark of a glob is; the length of a path without one."""
    return min((path.find(mark) for mark in "*?[" if mark in path), default=len(path))


def _inside(system: fs.FileSystem, folder: str) -> list[str]:
    base = folder.rstrip("/")
    listed = list_folder(system, folder, recursive=True)
    names = [info.path for info in listed if info.type == fs.FileType.File]
    return sorted(name for name in names if not _hidden(name[len(base) :]))


def _match(system: fs.FileSystem, listing: _Listing, done: str, segments: list[str]) -> Iterator[str]:
    """Files below `done` that match the segments of a glob; of a matching folder, all files inside."""
    while segments and _glob_start(segments[0]) == len(segments[0]):
        done, segments = done + segments[0] + ("/" if len(segments) > 1 else ""), segments[1:]
    if not segments:
        info = system.get_file_info(done)
        if info.type == fs.FileType.File:
            yield done
        elif info.type == fs.FileType.Directory:
            yield from _inside(system, done)
        return
    segment, rest = segments[0], segments[1:]
    if segment == "**":
        yield from _match(system, listing, done, rest or ["*"])
    fits = re.compile(translate("*" if segment == "**" else segment))
    for name, is_folder in listing.inside(done.rstrip("/") or done or "."):
        if (_hidden(name) and not segment.startswith(name[0])) or not fits.fullmatch(name):
            continue
        inner = done + name
        if segment == "**":
            if is_folder:
                yield from _match(system, listing, inner + "/", segments)
        elif rest:
            if is_folder:
                yield from _match(system, listing, inner + "/", rest)
        else:
            yield from _match(system, listing, inner, [])


def _hidden(path: str) -> bool:
    return any(name[:1] in ("_", ".") for name in path.split("/") if name)
