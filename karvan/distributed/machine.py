"""`machine_id`: which machine a process is on."""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """An identifier that all processes of one machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
