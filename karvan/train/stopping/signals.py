"""Ctrl-C and SIGTERM: the first one stops after the current step, a second Ctrl-C aborts.

SIGTERM is for the program, not for one fit of it: whoever sent it will not wait for the next one. So after a
SIGTERM every further fit, and every further TrainContext, raises a `TerminatedError` when it starts, until
`reset_termination` is called. Ctrl-C in a notebook ends a cell, and the next one may train again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from karvan.distributed import CollectiveChannel

_REASONS = {signal.SIGINT: "interrupt", signal.SIGTERM: "terminate"}


class TerminatedError(RuntimeError):
    """Training was requested after a SIGTERM had ended the training of this program."""


class _Termination:
    """Whether a SIGTERM has ended a fit of this process, or one of a rank that it trains with."""

    received = False


def note_termination() -> None:
    """A SIGTERM has ended a fit, of this or another rank."""
    _Termination.received = True


def reset_termination() -> None:
    """Allow training again after a SIGTERM has ended a fit.

    Without it, every further fit raises a TerminatedError, because whoever sent the signal does not wait for
    the next one.

    Example:
        >>> kv.train.reset_termination()
    """
    _Termination.received = False


def is_terminated() -> bool:
    """Whether a SIGTERM has ended a fit of this process."""
    return _Termination.received


def check_not_terminated(channel: CollectiveChannel) -> None:
    """Raise a TerminatedError if a SIGTERM has ended the training of this program, on any rank."""
    if any(channel.gather_json(_Termination.received)):
        note_termination()
        raise TerminatedError(
            "SIGTERM has ended the training of this program, so nothing more is trained: the fit that it "
            "stopped has saved a checkpoint if it has a folder for them, and running the program again "
            "resumes from it. To train on purpose, call karvan.train.reset_termination() first."
        )


class Signals:
    """Catches both signals while it is entered, on the main thread; on others Python has no signals.

    `received` is None, "interrupt" or "terminate".
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Signals:
        self.received = None
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _REASONS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None means a handler that was not installed by Python and cannot be restored by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.received:
            self.received = _REASONS[signal.Signals(number)]
            if number == signal.SIGTERM:
                note_termination()
            # Not print: the handler may have interrupted one.
            os.write(2, b"\nStopping after this step. Ctrl-C aborts at once.\n")
