"""Lists folders of any file system.

fsspec's own walk skips folders that it cannot list, so a store that fails for a moment would seem to have
fewer files, and records would be lost silently. Here its folders are listed one by one,
and a folder that cannot be listed is an error.
"""

from __future__ import annotations

from typing import Any

from pyarrow import fs


def list_folder(
    system: fs.FileSystem, folder: str, *, recursive: bool = False, missing_ok: bool = False
) -> list[fs.FileInfo]:
    """Files and folders inside of a folder; missing_ok: an empty list if the folder does not exist."""
    if isinstance(system, fs.PyFileSystem) and isinstance(system.handler, fs.FSSpecHandler):
        return _list_fsspec(system.handler.fs, folder, recursive, missing_ok)
    found: list[fs.FileInfo] = system.get_file_info(
        fs.FileSelector(folder, recursive=recursive, allow_not_found=missing_ok)
    )
    return found


def _list_fsspec(files: Any, folder: str, recursive: bool, missing_ok: bool) -> list[fs.FileInfo]:
    found: list[fs.FileInfo] = []
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
            found.append(fs.FileInfo(name.rstrip("/"), type=kind, size=entry.get("size") or 0))
            if is_folder and recursive:
                waiting.append(name)
    return found
