"""Folders that appear complete or not at all.

A checkpoint is written into a hidden folder next to its final path and renamed once it is complete. Its
writer holds a lock in the hidden folder, which the system releases when the process ends, however it ends: a
hidden folder without a held lock was left by a crashed process and may be removed. Creating, publishing and
removing hold this user's lock of the parent for a moment, so that several processes may work in it. Leftovers
of another user are not removed. See `karvan/checkpoint/format/atomic_folder.py`.

A folder that cannot be removed is a warning, not an error: it harms no checkpoint, and every save tries
again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.object_store import step_objects
from karvan.errors import is_temporary
from karvan.files import sync_folder
from karvan.job.checkpoint_url import url_of

# Lock files of a folder, which other users cannot open.
#
# A lock is a `flock` on a file of mode 0600, so that users who may only read the folder cannot hold it. The
# file says which process holds the lock, on which host, since when; a process that waits logs that. The
# system releases the lock when its process ends, however it ends, so a file that was left by a killed
# process blocks nobody: the next owner takes it over. A released lock's file is removed; a process that
# waited for the removed file notices that its name does not exist, or is another file's, and starts over.
#
# Every user has a separate lock in a folder: processes of one user exclude each other. Processes of different
# users do not, because otherwise one user could hold the lock for ever and block the others.


_log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # some network file systems
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FIRST_REPORT, _NEXT_REPORTS = 1.0, 30.0  # seconds
_LONGEST_PAUSE = 0.05


class FileLock:
    """A lock that this process holds until it releases it.

    effective: False where the file system has no locks, so that others may hold it as well.
    owner: the uid that this process has on the file system.
    """

    def __init__(self, path: Path, number: int, effective: bool) -> None:
        self.path = path
        self.effective = effective
        self.owner = os.fstat(number).st_uid
        self._number = number

    def release(self) -> None:
        """Remove the file and let others have the lock."""
        with suppress(OSError):
            self.path.unlink()
        os.close(self._number)


@contextmanager
def folder_lock(folder: Path) -> Iterator[FileLock]:
    """Hold this user's lock of a folder; waits for it, and logs who holds it."""
    lock = take_lock(folder / f".karvan-lock-{os.geteuid()}")
    try:
        yield lock
    finally:
        lock.release()


def take_lock(path: Path, *, wait: bool = True) -> FileLock:
    """A lock on a file, which is created if necessary; unless `wait`, a BlockingIOError if it is held."""
    begin, report, pause = time.monotonic(), _FIRST_REPORT, 0.001
    while True:
        number = _open(path)
        try:
            effective = _try_lock(number)
            if effective is not None and (not effective or _is_at(path, number)):
                _write_holder(number)
                return FileLock(path, number, effective)
            if effective is None:
                if not wait:
                    raise BlockingIOError(errno.EWOULDBLOCK, "The lock is held", str(path))
                waited = time.monotonic() - begin
                if waited >= report:
                    _report(path, number, waited)
                    report = waited + _NEXT_REPORTS
        except BaseException:
            os.close(number)
            raise
        os.close(number)
        if effective is None:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def is_held(path: Path) -> bool:
    """Whether a running process holds the lock of a file, or may hold it; a missing file is not held."""
    try:
        number = os.open(path, _FLAGS)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not _try_lock(number)
    finally:
        os.close(number)


def _open(path: Path) -> int:
    while True:
        try:
            number = os.open(path, _FLAGS)
        except FileNotFoundError:
            try:
                number = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue  # another process was faster
            os.fchmod(number, 0o600)
            return number
        except OSError as error:
            raise _refused(path, error) from None
        try:
            _check(path, number)
        except BaseException:
            os.close(number)
            raise
        return number


def _refused(path: Path, error: OSError) -> OSError:
    if error.errno == errno.ELOOP:
        return OSError(error.errno, "Expected a lock file, got a symbolic link; remove it", str(path))
    try:
        owner = os.stat(path, follow_symlinks=False).st_uid
    except OSError:
        return error
    if error.errno in (errno.EACCES, errno.EPERM) and owner != os.geteuid():
        return _foreign(path, owner)
    return error


def _foreign(path: Path, owner: int) -> PermissionError:
    return PermissionError(
        errno.EACCES,
        f"The lock file belongs to uid {owner}, expected uid {os.geteuid()}, the user of this process; "
        "remove it, and let nobody else write to the folder",
        str(path),
    )


def _check(path: Path, number: int) -> None:
    """Raise unless the file is a lock of this user, which nobody else can open."""
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(
            errno.EINVAL, "Expected a lock file, got something that is not a regular file", str(path)
        )
    if status.st_nlink > 1:  # writing to it would damage a file with another name
        raise OSError(errno.EMLINK, "Expected a lock file, got a hard link; remove it", str(path))
    if status.st_uid != os.geteuid() and status.st_uid != _own_uid(path.parent):
        raise _foreign(path, status.st_uid)
    if status.st_mode & 0o077:
        os.fchmod(number, 0o600)


def _own_uid(folder: Path) -> int:
    """The uid of files that this process creates, which a network file system may map to another."""
    name = folder / f".karvan-uid-{secrets.token_hex(8)}"
    number = os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return os.fstat(number).st_uid
    finally:
        os.close(number)
        name.unlink()


def _try_lock(number: int) -> bool | None:
    """Lock the file; False if the file system has no locks, None if another process holds it."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _is_at(path: Path, number: int) -> bool:
    """Whether the file still has its name; its last owner may have removed it."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    open_status = os.fstat(number)
    return (status.st_dev, status.st_ino) == (open_status.st_dev, open_status.st_ino)


def _write_holder(number: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with suppress(OSError):  # on a full disk a lock that does not name its holder is better than none
        os.ftruncate(number, 0)
        os.pwrite(number, json.dumps(holder).encode(), 0)


def _report(path: Path, number: int, waited: float) -> None:
    _log.warning(
        "Waiting for the lock of %s for %.0f s; it is held by %s. Saving continues when that process "
        "releases it or ends.",
        path.parent,
        waited,
        _holder(number),
    )


def _holder(number: int) -> str:
    try:
        content = json.loads(os.pread(number, 4096, 0))
        return f"process {int(content['pid'])} on {content['host']} since {content['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "an unknown process"


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
        remaining = ", ".join(folder.name for folder in folders if folder not in asides)
        _log.warning("%s could not be set aside in %s: %s", remaining, parent, error)
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
