"""Files that exist in memory alone: secrets that have travelled to another node, and addresses that change.

Such a file belongs to the process that made it: others of the same user open it by a path below /proc, with
mode 0400. It is on no disk, and is gone with the process, also after kill -9.
"""

from __future__ import annotations

import os


class PrivateFile:
    """A file, whose path is valid as long as this process lives."""

    def __init__(self, name: str, content: bytes) -> None:
        self._file = os.memfd_create(name, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.write(content)
        os.fchmod(self._file, 0o400)

    def write(self, content: bytes) -> None:
        """Replace its content; only this process can."""
        with open(self._file, "r+b", closefd=False) as writer:
            writer.seek(0)
            writer.write(content)
            writer.truncate()
