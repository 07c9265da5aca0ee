"""Closes clients and servers when a program ends, clients first.

Threads that are inside Flight when the interpreter ends would crash the process; Flight itself would wait
for as long as a caller holds a stream of a server open.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

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
