"""Folders that appear complete or not at all.

A checkpoint is written into a hidden folder next to its final path and renamed once it is complete. Its
writer holds a lock in the hidden folder, which the system releases when the process ends, however it ends: a
hidden folder without a held lock was left by a crashed process and may be removed. Creating, publishing and
removing hold this user's lock of the parent for a moment, so that several processes may work in it. Leftovers
of another user are not removed. See `karvan/checkpoint/io/folder_locks.py`.

A folder that cannot be removed is a warning, not an error: it harms no checkpoint, and every save tries
again.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.io.folder_locks import FileLock, folder_lock, is_held, take_lock
from karvan.checkpoint.object_store import step_objects
from karvan.files import sync_folder
from karvan.job.checkpoint_url import url_of
from karvan.outages import is_temporary

_log = logging.getLogger(__name__)

_HIDDEN = re.compile(r"^\..+\.tmp-\d+-[0-9a-f]{8}$")
_LOCK = ".lock"  # in a hidden folder, while its writer runs
DAMAGED, ABANDONED = "damaged", "abandoned"  # prefixes of the names of folders that were set aside
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class HiddenFolder:
    """A folder that is being written, next to `target`; removed unless it was published."""

    def __init__(self, target: Path) -> None:
        self.target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder_lock(target.parent) as lock:
            if lock.effective:
                _remove_leftovers(target.parent, lock.owner)
            self.path = _hidden_name(target)
            self.path.mkdir()
            self._lock: FileLock | None = take_lock(self.path / _LOCK)

    def remove_all_but(self, names: Iterable[str]) -> None:
        """Remove the files that have other names, relative to the folder."""
        stay = {self.path / name for name in names} | {self.path / _LOCK}  # without a lock it is a leftover
        for path in [path for path in self.path.rglob("*") if path.is_file() and path not in stay]:
            path.unlink(missing_ok=True)

    def publish(self, check: Callable[[], None], replaces: Callable[[Path], bool] = lambda _: True) -> None:
        """Rename the folder to `target`, unless `check` raises; a previous folder of that name is hidden.

        replaces: whether the previous folder may be removed; otherwise it is set aside.
        """
        for folder, _, _ in os.walk(self.path, topdown=False):
            sync_folder(Path(folder))
        with folder_lock(self.target.parent):
            check()
            self._release()  # others look for leftovers only under the parent's lock
            if os.path.lexists(self.target) and not replaces(self.target):
                aside = _aside_name(self.target, DAMAGED)
                self.target.rename(aside)
                _log.warning("%s is not an intact checkpoint; it was renamed to %s.", self.target, aside.name)
            if self.target.exists():
                _exchange(self.path, self.target)
            else:
                self.path.rename(self.target)
            sync_folder(self.target.parent)

    def remove(self) -> None:
        """Remove the folder if it has not been published, or the one that it replaced."""
        _remove_tree(self.path)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def try_writing(parent: Path) -> None:
    """Do what a save does, with one small file: raise a CheckpointError if that is not possible."""
    if url_of(parent) is not None:
        return step_objects.try_writing(parent)
    try:
        hidden = HiddenFolder(parent / "trial")
        try:
            with open(hidden.path / "trial", "wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())  # some file systems notice only here that there is no room
        finally:
            hidden.remove()
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename and Path(error.filename) != parent else ""
        raise CheckpointError(
            parent,
            f"checkpoints cannot be written here: {reason}{where}. Expected a folder that can be created and "
            "written to, with space for checkpoints.",
            temporary=is_temporary(error),
        ) from None  # the text says everything


def remove_folders(parent: Path, doomed: Callable[[], Mapping[Path, Path | None]]) -> None:
    """Remove the folders that `doomed` returns, each with the one it builds on, while nobody else publishes.

    Each disappears at once, in this order; a process that is killed in between leaves the later ones. The
    base of a folder that cannot be removed stays, too.
    """
    if url_of(parent) is not None:
        return step_objects.remove_steps(parent, doomed)
    hidden: list[Path] = []
    stays: set[Path | None] = set()
    try:
        with folder_lock(parent):
            for folder, base in doomed().items():
                name = _hidden_name(folder)
                if folder not in stays and _rename(folder, name):
                    hidden.append(name)
                else:
                    stays.add(base)
            sync_folder(parent)
            for name in hidden:
                _remove_tree(name)
    except OSError as error:
        _warn(f"Old checkpoints in {parent}", error)


def set_aside(folders: Sequence[Path], kind: str) -> dict[Path, Path]:
    """Rename folders of one parent to `KIND-…`; returns the new names, and warns of a failure."""
    asides: dict[Path, Path] = {}
    parent = folders[0].parent
    if url_of(parent) is not None:
        return step_objects.set_aside(folders, kind)
    try:
        with folder_lock(parent):
            for folder in folders:
                aside = _aside_name(folder, kind)
                try:
                    folder.rename(aside)
                except FileNotFoundError:
                    continue  # another process has removed it
                asides[folder] = aside
            sync_folder(parent)
    except OSError as error:
        left = ", ".join(folder.name for folder in folders if folder not in asides)
        _log.warning("%s could not be set aside in %s: %s", left, parent, error)
    return asides


def _aside_name(folder: Path, kind: str) -> Path:
    """An unused name next to a folder."""
    name = folder.with_name(f"{kind}-{folder.name}")
    number = 2
    while os.path.lexists(name):
        name = folder.with_name(f"{kind}-{folder.name}-{number}")
        number += 1
    return name


def _rename(folder: Path, name: Path) -> bool:
    try:
        folder.rename(name)
    except OSError as error:
        _warn(str(folder), error)
        return False
    return True


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # as much of it as can be
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # it has been removed
    except OSError as error:
        _warn(str(folder), error)


def _warn(what: str, error: OSError) -> None:
    _log.warning("%s could not be removed; the next save tries again: %s", what, error)


def _hidden_name(target: Path) -> Path:
    return target.parent / f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"


def _remove_leftovers(parent: Path, owner: int) -> None:
    for entry in list(os.scandir(parent)):
        if not _HIDDEN.match(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            mine = entry.stat(follow_symlinks=False).st_uid == owner
        except FileNotFoundError:
            continue  # its writer has just finished
        path = Path(entry.path)
        if mine and not is_held(path / _LOCK):
            _remove_tree(path)


def _exchange(a: Path, b: Path) -> None:
    """Swap two folders, atomically where the system supports it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename and rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return
    aside = _hidden_name(b)
    b.rename(aside)
    a.rename(b)
    aside.rename(a)
