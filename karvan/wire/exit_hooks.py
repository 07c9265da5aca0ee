"""Closes clients and servers when a program ends, clients first.

Threads that are inside Flight when the interpreter ends would end the process, and loudly; Flight itself
would wait at a server for as long as somebody holds a stream open.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class OpenClient(Protocol):
    """Something that talks to a service."""

    def begin_closing(self) -> None:
        """Say good-bye, without waiting."""

    def close(self) -> None:
        """Wait until that is done."""


class Listener(Protocol):
    """Something that listens at a port."""

    def close(self) -> None:
        """Stop."""


_callers: weakref.WeakSet[OpenClient] = weakref.WeakSet()
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def close_at_exit(caller: OpenClient | None = None, listener: Listener | None = None) -> None:
    """Close it at the end of the program, should that come first."""
    if caller is not None:
        _callers.add(caller)
    if listener is not None:
        _listeners.add(listener)
    # What is registered last is done first: before what Flight has registered in the meantime.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def closed(caller: OpenClient | None = None, listener: Listener | None = None) -> None:
    """It is closed already."""
    if caller is not None:
        _callers.discard(caller)
    if listener is not None:
        _listeners.discard(listener)


def _close_all() -> None:
    callers = list(_callers)
    for caller in callers:
        caller.begin_closing()
    for caller in callers:
        caller.close()
    for listener in list(_listeners):
        listener.close()
