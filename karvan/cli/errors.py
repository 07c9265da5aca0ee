"""What goes wrong on the command line, and the exit codes that tell scripts.

| code | meaning |
|---|---|
| 0 | done |
| 1 | the job failed: an error in the model, in its file, or while it ran |
| 2 | wrong usage: an unknown option, a wrong value, a config or a file that does not say what to do |
| 3 | data or a checkpoint is damaged, cannot be read, or is not there |
| 130 | stopped by Ctrl-C; `train` has saved a checkpoint |
| 143 | stopped by SIGTERM; `train` has saved a checkpoint |
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from karvan.settings import SettingsError

OK, FAILED, USAGE, DAMAGED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
STOPPED = {"interrupt": INTERRUPTED, "terminate": TERMINATED}  # by what a fit says of itself


class CommandError(Exception):
    """An error to be shown as it is, and the exit code that goes with it."""

    def __init__(self, text: str, code: int = USAGE) -> None:
        super().__init__(text)
        self.code = code


def code_of(error: BaseException) -> int:
    """The exit code of an error that a command raised."""
    if isinstance(error, CommandError):
        return error.code
    if _is_missing_or_damaged(error):
        return DAMAGED
    if _is_of_settings(error):
        return DAMAGED if error.unreadable else USAGE
    if _is(error, "karvan.train", "TerminatedError"):
        return TERMINATED
    return FAILED


def text_of(error: BaseException) -> str:
    """One or two lines for a person: what was expected, what was received, and where, if that helps."""
    explained = isinstance(error, CommandError) or _is(error, "karvan.limits", "LimitError")
    if explained or _is_missing_or_damaged(error) or _is_of_settings(error):
        return _plain(error)
    kind = type(error).__name__
    known = isinstance(error, ValueError | TypeError | KeyError | RuntimeError)
    told = _plain(error) if known and _plain(error) else f"{kind}: {_plain(error)}".removesuffix(": ")
    return f"{told}\n({kind} in {_place(error)}; --debug shows how it came to that)"


def show(error: BaseException, *, debug: bool) -> None:
    """Put an error on stderr."""
    if debug:
        traceback.print_exception(error)
    tell(text_of(error))


def tell(text: str) -> None:
    """`error: …` on stderr, the word in red where there are colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("error:", "bold red"), " ", text), highlight=False)


def _plain(error: BaseException) -> str:
    if isinstance(error, KeyError) and error.args:  # str() of a KeyError puts quotes around its text
        return str(error.args[0])
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error).strip()


def _is_missing_or_damaged(error: BaseException) -> bool:
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError):
        return True
    return _is(error, "karvan.checkpoint", "CheckpointError") or _is(error, "karvan.data", "DataError")


def _is_of_settings(error: BaseException) -> TypeGuard[SettingsError]:
    return _is(error, "karvan.settings", "SettingsError")


def _is(error: BaseException, module: str, name: str) -> bool:
    # Only if somebody has imported it can it be what was raised.
    return module in sys.modules and isinstance(error, getattr(sys.modules[module], name))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # Somebody's own file says more than the library that it called.
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and "/karvan/" not in frame.filename
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
