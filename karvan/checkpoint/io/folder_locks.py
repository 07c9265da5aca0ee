"""Lock files of a folder, which other users cannot open.

A lock is a `flock` on a file of mode 0600, so that users who may only read the folder cannot hold it. The
file says which process holds the lock, on which host, since when; a process that waits logs that. The system
releases the lock when its process ends, however it ends, so a file that was left by a killed process blocks
nobody: the next owner takes it over. A released lock's file is removed; a process that waited for the removed
file notices that its name does not exist, or is another file's, and starts over.

Every user has a separate lock in a folder: processes of one user exclude each other. Processes of different
users do not, because otherwise one user could hold the lock for ever and block the others.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

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
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(
            errno.EINVAL, "Expected a lock file, got something that is not a regular file", str(path)
        )
    if found.st_nlink > 1:  # writing to it would damage a file with another name
        raise OSError(errno.EMLINK, "Expected a lock file, got a hard link; remove it", str(path))
    if found.st_uid != os.geteuid() and found.st_uid != _own_uid(path.parent):
        raise _foreign(path, found.st_uid)
    if found.st_mode & 0o077:
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
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    own = os.fstat(number)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


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
