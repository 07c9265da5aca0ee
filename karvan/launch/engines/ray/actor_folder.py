"""The temporary folder of an actor, with the files of its keeper, and what others have left behind.

An actor holds a lock on its folder as long as its process lives. Usually it removes the folder itself; if it
is killed, its keeper does. If both are killed, such as with all processes of a machine, the folder is left:
each actor that starts removes those whose actor and keeper are gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from karvan.launch.engines.local import keeper_lives

_PREFIX = "karvan-role-"


def make_folder() -> Path:
    """Make the folder of this process; it is locked as long as the process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # otherwise another actor took it for an abandoned one before it was locked
            return folder
        os.close(lock)


def remove_abandoned() -> None:
    """Remove the folders of this user on this machine whose actor and keeper are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not any(keeper_lives({"folder": each}) for each in folder.glob("processes/*")):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
