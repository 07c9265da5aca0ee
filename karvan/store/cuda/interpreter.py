"""Triton's interpreter, in which the kernels of a store on "cpu" run: threads launch one kernel at a time."""

from __future__ import annotations

import threading
from typing import Any

_patching = threading.Lock()
_launching = threading.RLock()
_takes_turns = False


def take_turns() -> None:
    """Have threads wait for each other: the interpreter has one state, the current program, for all of them.

    A GPU needs no such thing. There is nothing to set in the interpreter, so its launch is replaced.
    """
    from triton.runtime import interpreter  # not needed on a GPU

    global _takes_turns
    with _patching:
        if _takes_turns:
            return
        _takes_turns = True
        run = interpreter.GridExecutor.__call__

        def run_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _launching:
                return run(self, *args, **kwargs)

        interpreter.GridExecutor.__call__ = run_alone
