"""Run a program of a job: `python -P -m karvan.launch.program FILE.py ARGUMENTS…`.

The program sees what `python FILE.py ARGUMENTS…` would show it: `sys.argv`, its folder first in `sys.path`,
and itself as `__main__`. The difference is how an uncaught error ends it:

- An error of Karvan is one line, `error: …`, as in commands; KARVAN_DEBUG=1 shows the traceback as well.
- Any other error shows its traceback, without the frames of this module.
- The exit code says whether a retry may help; see `karvan/errors.py`.

A rank that fails because another one has failed gets a RankError, whose line names the other; its code says
temporary, so that the launcher waits for the code of the rank that failed first
(`karvan/launch/restarts.py`).
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import traceback
import types

from karvan import errors
from karvan.job.environment import variable
from karvan.process_end import run_to_end

_DEBUG = variable("debug")  # read separately: an error may be about another variable


def main() -> int:
    """Run the program of the command line; returns its exit code unless it calls sys.exit itself."""
    if len(sys.argv) < 2:
        print("error: Expected a FILE.py to run, got nothing.", file=sys.stderr)
        return errors.USAGE
    path = sys.argv[1]
    sys.argv = sys.argv[1:]
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"error: {errors.plain(error)}", file=sys.stderr)
        return errors.DAMAGED
    try:
        run(path, source)
    except KeyboardInterrupt as error:
        show_traceback(error)
        return errors.INTERRUPTED
    except Exception as error:
        show(error)
        return errors.code_of_program(error)
    return errors.OK


def run(path: str, source: bytes) -> None:
    """Run a program's source as `__main__`."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which is that of `python -m`
    if not os.environ.get("PYTHONSAFEPATH"):  # a launched job runs this module with -P
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    path = os.path.abspath(path)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module  # not restored: atexit, pickle and spawned processes need it
    exec(compile(source, path, "exec"), module.__dict__)


def show(error: BaseException) -> None:
    """Print an error to stderr, unless the program has set its own hook for that."""
    # torch.distributed sets one that shows the traceback of each rank.
    of_torch = str(getattr(sys.excepthook, "__module__", "")).startswith("torch.")
    if sys.excepthook is not sys.__excepthook__ and not of_torch:
        sys.excepthook(type(error), error, error.__traceback__)
        return
    ours = errors.is_ours(error)
    if not ours or os.environ.get(_DEBUG, "") not in ("", "0"):
        show_traceback(error)
    if ours:
        print(f"error: {errors.text_of(error, f'{_DEBUG}=1')}", file=sys.stderr, flush=True)


def show_traceback(error: BaseException) -> None:
    """Print a traceback as Python does, starting at the program's first frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace, file=sys.stderr)
    sys.stderr.flush()


if __name__ == "__main__":
    run_to_end(main)
