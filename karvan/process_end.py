"""The end of a program: clients and servers are closed, and threads of native libraries are not waited for.

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
import signal
import sys
import threading
import time
import weakref
from _io import _IOBase
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol

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


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """While inside, signals have other handlers; on the main thread, as on others Python has no signals."""
    on_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if on_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None means a handler that was not installed by Python and cannot be restored by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


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


# Clients and servers are closed when a program ends, clients first.
#
# Threads that are inside Flight when the interpreter ends would crash the process; Flight itself would wait
# for as long as a caller holds a stream of a server open.

_LONGEST_WAIT = 10.0  # seconds, at the end of the program, for calls that a closed server still executes


class OpenClient(Protocol):
    """A client of a service."""

    def begin_closing(self) -> None:
        """Say good-bye, without waiting."""

    def close(self) -> None:
        """Wait until it is closed."""


class Listener(Protocol):
    """A server that listens at a port."""

    def close(self) -> None:
        """Stop."""


_callers: weakref.WeakSet[OpenClient] = weakref.WeakSet()
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_first: list[Callable[[], None]] = []
_shutdowns: list[threading.Thread] = []


def close_at_exit(caller: OpenClient | None = None, listener: Listener | None = None) -> None:
    """Close it when the program ends, unless it is closed before."""
    if caller is not None:
        _callers.add(caller)
    if listener is not None:
        _listeners.add(listener)
    # The last registration runs first: before what Flight has registered in the meantime.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def first_at_exit(function: Callable[[], None]) -> None:
    """Call it when the program ends, before clients and servers are closed: it may still need them."""
    _first.append(function)
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def not_at_exit(function: Callable[[], None]) -> None:
    """Undo `first_at_exit`."""
    if function in _first:
        _first.remove(function)


def closed(caller: OpenClient | None = None, listener: Listener | None = None) -> None:
    """Forget it: it is closed."""
    if caller is not None:
        _callers.discard(caller)
    if listener is not None:
        _listeners.discard(listener)


def finish_at_exit(shutdown: threading.Thread) -> None:
    """Wait, when the program ends, for the shutdown of a server that still executes calls.

    A call that ends while the interpreter does crashes the process. One that ends after that is lost without
    harm, so the wait is limited.
    """
    _shutdowns.append(shutdown)


@atexit.register  # when this module is imported: it runs after all functions that are registered later
def _finish_shutdowns() -> None:
    due = time.monotonic() + _LONGEST_WAIT
    for shutdown in _shutdowns:
        shutdown.join(max(0.0, due - time.monotonic()))


def _close_all() -> None:
    while _first:
        _first.pop()()
    callers = list(_callers)
    for caller in callers:
        caller.begin_closing()
    for caller in callers:
        caller.close()
    for listener in list(_listeners):
        listener.close()
