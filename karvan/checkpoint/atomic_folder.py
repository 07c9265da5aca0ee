"""Folders that appear complete or not at all.

A checkpoint is written into a hidden folder next to its final path and renamed once it is complete. Its
writer holds a lock in the hidden folder, which the system releases when the process ends, however it ends: a
hidden folder without a held lock was left by a crashed process and may be removed. Creating, publishing and
removing hold this user's lock of the parent for a moment, so that several processes may work in it. Leftovers
of another user are not removed. At a URL, a checkpoint is complete once its manifest is there; see
`UploadFolder`.

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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from karvan.checkpoint import manifest as manifests
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.files import (
    Listed,
    listing,
    present,
    read_bytes,
    remove_below,
    remove_object,
    write_object,
)
from karvan.checkpoint.manifest import NAME, Manifest
from karvan.checkpoint.safetensors_file import Throttle, write_file
from karvan.errors import is_temporary
from karvan.files import sync_folder
from karvan.job.checkpoint_url import shown, url_of

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


def take_lock(path: Path) -> FileLock:
    """A lock on a file, which is created if necessary."""
    begin, report, pause = time.monotonic(), _FIRST_REPORT, 0.001
    while True:
        number = _open(path)
        try:
            effective = _try_lock(number)
            if effective is not None and (not effective or _is_at(path, number)):
                _write_holder(number)
                return FileLock(path, number, effective)
            if effective is None and (waited := time.monotonic() - begin) >= report:
                _log.warning(
                    "Waiting for the lock of %s for %.0f s; it is held by %s. Saving continues when that "
                    "process releases it or ends.",
                    *(path.parent, waited, _holder(number)),
                )
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
            break
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process was faster
                number = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
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
    return os.path.samestat(status, os.fstat(number))


def _write_holder(number: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with suppress(OSError):  # on a full disk a lock that does not name its holder is better than none
        os.ftruncate(number, 0)
        os.pwrite(number, json.dumps(holder).encode(), 0)


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

    def complete(self, manifest: Manifest, pace: Throttle, check: Callable[[], None]) -> bytes:
        """Write the manifest, and publish the folder; returns the manifest's content."""
        data, path = manifests.to_bytes(manifest), self.path / NAME
        # A parameter server that died while it wrote its share leaves files; another wrote it instead.
        self.remove_all_but(file.name for file in manifests.parse(path, data).files)
        write_file(path, [memoryview(data)], pace)
        self.publish(check)
        return data

    def publish(self, check: Callable[[], None]) -> None:
        """Rename the folder to `target`, unless `check` raises.

        A checkpoint of that name is hidden and then removed; anything else is set aside.
        """
        for folder, _, _ in os.walk(self.path, topdown=False):
            sync_folder(Path(folder))
        with folder_lock(self.target.parent):
            check()
            self._release()  # others look for leftovers only under the parent's lock
            if os.path.lexists(self.target) and not _is_checkpoint(self.target):
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


def _is_checkpoint(folder: Path) -> bool:
    try:
        manifests.read(folder)
    except CheckpointError:
        return False
    return True


def try_writing(parent: Path) -> None:
    """Do what a save does, with one small file: raise a CheckpointError if that is not possible."""
    at_url = url_of(parent) is not None
    try:
        if at_url:
            write_trial(parent)
        else:
            _write_trial(parent)
    except OSError as error:
        where, expected = "", "a URL where this process may write, list and delete objects"
        if not at_url:
            where = f" ({error.filename})" if error.filename and Path(error.filename) != parent else ""
            expected = "a folder that can be created and written to, with space for checkpoints"
        raise CheckpointError(
            parent,
            f"checkpoints cannot be written here: {error.strerror or error}{where}. Expected {expected}.",
            temporary=is_temporary(error),
        ) from None  # the text says everything


def _write_trial(parent: Path) -> None:
    hidden = HiddenFolder(parent / "trial")
    try:
        with open(hidden.path / "trial", "wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())  # some file systems notice only here that there is no room
    finally:
        hidden.remove()


def remove_folders(parent: Path, doomed: Callable[[], Mapping[Path, Path | None]]) -> None:
    """Remove the folders that `doomed` returns, each with the one it builds on, while nobody else publishes.

    Each disappears at once, in this order; a process that is killed in between leaves the later ones. The
    base of a folder that cannot be removed stays, too.
    """
    at_url = url_of(parent) is not None
    hidden: list[Path] = []

    def hide(folder: Path) -> None:
        name = _hidden_name(folder)
        folder.rename(name)
        hidden.append(name)

    def remove() -> None:
        stays: set[Path | None] = set()
        with nullcontext() if at_url else folder_lock(parent):
            for folder, base in doomed().items():
                work = partial(remove_step if at_url else hide, folder)
                if folder in stays or not tolerate(shown(folder), work):
                    stays.add(base)
            if not at_url:
                sync_folder(parent)
                for name in hidden:
                    _remove_tree(name)

    if at_url:
        remove()
        what = f"What killed saves have left in {shown(parent)}"
        tolerate(what, lambda: remove_leftovers(parent))
    else:
        tolerate(f"Old checkpoints in {parent}", remove)


def set_aside(folders: Sequence[Path], kind: str) -> dict[Path, Path]:
    """Rename folders of one parent to `KIND-…`; returns the new names, and warns of a failure.

    At a URL, their manifests are renamed.
    """
    asides: dict[Path, Path] = {}
    parent = folders[0].parent
    at_url = url_of(parent) is not None
    try:
        with nullcontext() if at_url else folder_lock(parent):
            for folder in folders:
                with suppress(FileNotFoundError):  # another process has removed it
                    asides[folder] = (rename_aside if at_url else _rename_aside)(folder, kind)
            if not at_url:
                sync_folder(parent)
    except OSError as error:
        remaining = ", ".join(folder.name for folder in folders if folder not in asides)
        _log.warning("%s could not be set aside in %s: %s", remaining, shown(parent), error)
    return asides


def _rename_aside(folder: Path, kind: str) -> Path:
    aside = _aside_name(folder, kind)
    folder.rename(aside)
    return aside


def _aside_name(folder: Path, kind: str) -> Path:
    """An unused name next to a folder."""
    name = folder.with_name(f"{kind}-{folder.name}")
    number = 2
    while os.path.lexists(name):
        name = folder.with_name(f"{kind}-{folder.name}-{number}")
        number += 1
    return name


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # as much of it as can be

    def remove_again() -> None:
        with suppress(FileNotFoundError):  # it has been removed
            shutil.rmtree(folder)

    tolerate(str(folder), remove_again)


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


# A checkpoint at a URL: published, replaced, set aside and removed by one object, its manifest.
#
#     run/step-000000000010/manifest.json                 written last, in one request
#     run/step-000000000010/save-1f0a93c2/dense.safetensors
#     run/step-000000000010/save-1f0a93c2/tables/…
#
# Each save has a folder of its own, which the names in the manifest include. So saving a step again changes
# nothing of the one before until the new manifest replaces the old one, at once; then the old files are
# removed. Objects that no manifest names were left by a save that failed or was killed: the next save of the
# step removes them, and any save those of other steps that are older than a day by the store's clock.
#
# A checkpoint that is set aside keeps its files: its manifest is renamed, to `damaged-manifest.json` or
# `abandoned-manifest.json`. Where a request fails without an answer, it is not known whether it was done; the
# order of requests is such that a checkpoint with a manifest always has its files.

ASIDE = {kind: f"{kind}-{NAME}" for kind in (DAMAGED, ABANDONED)}
_DAY = 24 * 3600.0  # older objects without a manifest belong to no save in flight


class UploadFolder:
    """A save of the checkpoint `target`, whose files are written to `path`; removed unless published."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target / f"save-{secrets.token_hex(8)}"
        self._removes = True

    def _named(self, manifest: Manifest) -> Manifest:
        """A manifest with the names that files have below `target`."""
        prefix = f"{self.path.name}/"
        tables = {
            name: replace(
                table,
                parts=[replace(part, name=prefix + part.name) for part in table.parts],
                extras=[extra and replace(extra, name=prefix + extra.name) for extra in table.extras],
            )
            for name, table in manifest.tables.items()
        }
        dense = replace(manifest.dense, name=prefix + manifest.dense.name)
        return replace(manifest, tables=tables, dense=dense)

    def complete(self, manifest: Manifest, pace: Throttle, check: Callable[[], None]) -> bytes:
        """Write the manifest, unless `check` raises, and remove what it replaces; returns its content."""
        data, path = manifests.to_bytes(self._named(manifest)), self.target / NAME
        check()
        self._removes = False  # from now on there may be a manifest that names these files
        try:
            write_object(path, [[memoryview(data)]])
        except OSError:
            if _content(path) != data:  # otherwise only the answer was lost
                raise
        tolerate(f"Objects that {shown(path)} does not name", lambda: _remove_others(self.target, data))
        return data

    def remove(self) -> None:
        """Remove the files, if they were not published."""
        if self._removes:
            tolerate(shown(self.path), lambda: remove_below(self.path))


def new_folder(target: Path) -> HiddenFolder | UploadFolder:
    """A folder for the files of a checkpoint, which its `complete` makes the one at `target`."""
    return HiddenFolder(target) if url_of(target) is None else UploadFolder(target)


def _content(path: Path) -> bytes | None:
    """The content of an object; None if there is none, or it cannot be read."""
    try:
        return read_bytes(path)
    except OSError:
        return None


def _remove_others(target: Path, data: bytes) -> None:
    """Remove the files of a step that neither its manifest names nor that of one that was set aside."""
    manifest = manifests.parse(target / NAME, data)
    named = {file.name for file in manifest.files}
    names = [item.name for item in listing(target)]
    manifest_names = {NAME, *ASIDE.values()}
    for name in manifest_names & {*names} - {NAME}:
        with suppress(CheckpointError):
            aside = manifests.parse(target / name, read_bytes(target / name))
            named |= {file.name for file in aside.files}
    for folder in {name.partition("/")[0] for name in names if name not in manifest_names}:
        inside = [name for name in names if name.startswith(f"{folder}/")]
        if not named.intersection(inside):
            remove_below(target / folder)
        else:
            for name in inside:
                if name not in named:
                    remove_object(target / name)


def published(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of some steps of a run that have a manifest."""
    return [path.parent.name for path in present([folder / name / NAME for name in names])]


def asides(folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """Those of some steps of a run that were set aside, and of which kind."""
    paths = [folder / name / aside for name in names for aside in ASIDE.values()]
    kinds = {aside: kind for kind, aside in ASIDE.items()}
    return [(path.parent.name, kinds[path.name]) for path in present(paths)]


def rename_aside(step: Path, kind: str) -> Path:
    """Rename the manifest of a checkpoint; returns its new name."""
    data = _content(step / NAME)
    if data is not None:  # otherwise another process has removed it
        write_object(step / ASIDE[kind], [[memoryview(data)]])
    remove_object(step / NAME)
    return step / ASIDE[kind]


def remove_step(step: Path) -> None:
    """Remove a checkpoint."""
    remove_object(step / NAME)
    if not asides(step.parent, [step.name]):
        remove_below(step)


def remove_leftovers(folder: Path) -> None:
    """Remove old objects of steps without any manifest."""
    by_step: dict[str, list[Listed]] = {}
    for item in listing(folder):
        step, _, rest = item.name.partition("/")
        if step.startswith("step-") and rest:
            by_step.setdefault(step, []).append(item)
    newest = max((item.written for items in by_step.values() for item in items), default=0.0)
    manifest_names = {NAME, *ASIDE.values()}
    for step, items in by_step.items():
        has_manifest = any(item.name.partition("/")[2] in manifest_names for item in items)
        if not has_manifest and max(item.written for item in items) < newest - _DAY:
            remove_below(folder / step)


def write_trial(folder: Path) -> None:
    """Write and remove a small object."""
    trial = folder / f".karvan-trial-{secrets.token_hex(8)}"
    write_object(trial, [[memoryview(bytes(64))]])
    remove_object(trial)


def tolerate(what: str, work: Callable[[], None]) -> bool:
    """Do work that harms no checkpoint if it fails; whether it succeeded."""
    try:
        work()
    except (OSError, CheckpointError) as error:
        _log.warning("%s could not be removed; the next save tries again: %s", what, error)
        return False
    return True
