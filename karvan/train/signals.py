"""Ctrl-C and SIGTERM: the first asks to stop at the next good moment, a second Ctrl-C aborts at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_REASONS = {signal.SIGINT: "interrupt", signal.SIGTERM: "terminate"}


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
            # None stands for a handler that was not installed by Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.received:
            self.received = _REASONS[signal.Signals(number)]
            # Not print: the handler may have interrupted one.
            os.write(2, b"\nStopping after this step. Ctrl-C aborts at once.\n")
