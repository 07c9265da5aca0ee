"""Files that exist in memory alone, for secrets that have travelled to another node.

Such a file belongs to the process that made it: others of the same user open it by a path below /proc, with
mode 0400. It is on no disk, and is gone with the process, also after kill -9.
"""

from __future__ import annotations

import os

from karvan.system_limits import forbid_core_dumps


def private_file(name: str, content: bytes) -> str:
    """Make a file; returns its path, which is valid as long as this process lives."""
    forbid_core_dumps()
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    os.fchmod(file, 0o400)
    return f"/proc/{os.getpid()}/fd/{file}"
