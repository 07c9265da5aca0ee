"""`ending_with_parent`: the command of a process that the kernel kills when the one that started it dies.

The process asks the kernel for that before it becomes the command, because no Python may run between fork and
exec of a program that has threads. It is for processes without a keeper, which share the output of their
parent. The parent's thread that starts them must live as long as they do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_START = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[1]):  # it died before the call above
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command, whose first word is a path, so that its process dies with this one, also by kill -9."""
    return [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command]
