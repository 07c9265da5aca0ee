"""The token of a launched job: a random one for every start, unless the job sets `token_file`.

The token is 32 random bytes, in hex, in a file that only its owner may read (0600), in a new folder that
only its owner may enter (0700). Processes of the job get the path in KARVAN_TOKEN_FILE; the token itself is
never an argument, an environment variable or a line of a log. The folder is in XDG_RUNTIME_DIR, which
belongs to one user, or else in the folder for temporary files. Its name is random and it is created, not
reused, so nobody can create it beforehand; its parent must be one in which other users cannot rename it.

The folder is removed when the job ends. A launcher that is killed leaves it behind, with a token that no
later start accepts: its services died with it, and the next start makes another token. While the launcher
runs it holds a lock on the folder. The lock shows systemd-tmpfiles that the folder is in use, and shows the
next launcher of the same user which folders were left by killed ones, so that it removes them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from karvan.launch.job_spec import JobSpec

_BYTES = 32
_PREFIX = "karvan-token-"


@contextmanager
def with_token(spec: JobSpec) -> Iterator[JobSpec]:
    """The job with a token file: its own, or a new one that exists while inside."""
    if spec.token_file is not None:
        yield spec
        return
    with _private_folder() as folder:
        path = folder / "token"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secrets.token_hex(_BYTES)}\n")
        yield spec.model_copy(update={"token_file": path})


@contextmanager
def _private_folder() -> Iterator[Path]:
    parent = _parent()
    _remove_left_behind(parent)
    folder, lock = _create_locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _create_locked(parent: Path) -> tuple[Path, int]:
    """A new folder and its lock; repeats if another launcher removes the folder before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700, and an error if it exists
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _parent() -> Path:
    """The parent of the folder: one in which nobody else can rename or remove it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_own(Path(runtime)):
        return Path(runtime)
    parent = Path(tempfile.gettempdir()).resolve()
    status = parent.stat()
    if status.st_uid not in (0, os.geteuid()) or (
        status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    ):
        raise ValueError(
            f"The job's token expects a folder in which other users cannot rename files, got {parent} "
            f"with mode {stat.S_IMODE(status.st_mode):o}. Set TMPDIR to a folder of your own, or token_file "
            "in the job."
        )
    return parent


def _is_own(parent: Path) -> bool:
    try:
        status = parent.stat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
        and os.access(parent, os.W_OK | os.X_OK)
    )


def _remove_left_behind(parent: Path) -> None:
    """Remove folders of this user whose launchers were killed: nobody holds their locks."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another launcher may be removing it
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
