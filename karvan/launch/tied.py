"""Run a command whose process ends when its parent's does: `python tied.py PARENT COMMAND…`.

The kernel sends a process the signal that it has asked for when its parent dies, whatever the parent died of,
and exec does not change that. Asking has to happen in the child; done here, in a program of its own that then
becomes the command, no Python runs between fork and exec of a launcher that has threads. What the command has
started itself is not reached: it must notice that its own parent is gone, as after any kill -9.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}.")
