"""A disk of a few megabytes that tests fill, empty and make read-only; it needs root and tmpfs."""

import os
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs at `folder`."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._filler = self.folder / "filler"

    def fill(self):
        """Leave no byte of room."""
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self):
        """Give the room back."""
        self._filler.unlink(missing_ok=True)

    def take_away(self):
        """Unmount it; the folder below it is on another disk."""
        _check("umount", "-l", self.folder)

    def make_read_only(self):
        """Let every change fail, as after an error of a real disk; files that are open do not prevent it."""
        _check("mount", "--bind", self.folder, self.folder)
        _check("mount", "-o", "remount,ro,bind", self.folder)

    def make_writable(self):
        """Take the read-only view away."""
        _check("umount", "-l", self.folder)


@contextmanager
def small_disk(folder, size="1m"):
    """A new disk at a folder, or a skipped test where the system does not let us make one."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    mounted = _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        _run("umount", "-l", folder)


def _check(*command):
    done = _run(*command)
    assert not done.returncode, done.stderr


def _run(*command):
    return subprocess.run([*map(os.fspath, command)], capture_output=True, text=True, check=False)
