"""The end of a program of ours, which waits for its work but not for threads of native libraries.

While the interpreter is torn down, an Arrow thread that reads in advance from a file system written in Python
(fsspec), or releases the last piece of such a file, aborts the process. Arrow's own last step waits for its
threads: for ever, if one is stuck in a read. Both happen after the result was printed. So the process ends
before: threads that are not daemons have ended, functions of `atexit` were called, files that are still open
for writing are closed, and nothing is torn down.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from _io import _IOBase
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

_LONGEST_CLOSE = 10.0  # seconds: another thread may be stuck in a file


class PreparedThread(threading.Thread):
    """A daemon thread that has started, and calls its function after `begin`.

    While the interpreter ends, Python 3.12 and later start no threads.
    """

    def __init__(self, function: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self._begun = threading.Event()
        self.start()

    def begin(self) -> None:
        """Call the function now; `join` waits until it has returned."""
        self._begun.set()

    def run(self) -> None:
        """Wait for `begin`."""
        self._begun.wait()
        self._function()


def run_to_end(main: Callable[[], int]) -> NoReturn:
    """Run a program and end the process with its exit code."""
    try:
        code = main()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise  # with a text, which the interpreter prints
        code = end.code or 0
    closing = PreparedThread(_close_files, "karvan-close")
    atexit.register(_end, code, closing)  # the last one that is registered is the first that is called
    sys.exit(code)


def _end(code: int, closing: PreparedThread) -> None:
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    closing.begin()
    closing.join(_LONGEST_CLOSE)
    os._exit(code & 0xFF)


def _close_files() -> None:
    """Close what is open for writing, as the interpreter would: its last lines may be in a buffer."""
    # Not isinstance: it would ask objects for their class, which some compute.
    for file_ in [object_ for object_ in gc.get_objects() if issubclass(type(object_), _IOBase)]:
        with suppress(Exception):
            if not file_.closed and file_.writable():
                file_.close()
