"""Exit codes of commands and of launched programs, and the text that is printed for an error.

| code | meaning | a launched job |
|---|---|---|
| 0 | done | |
| 1 | failed: an error in the model, in its file, or while it ran | restarts; ends after three in a row |
| 2 | wrong usage: an unknown option or value, an incomplete config, a folder of another run | ends |
| 3 | data or a checkpoint is damaged, cannot be read, or does not exist | ends |
| 75 | temporary: an outage (a full disk, unreachable data or servers, a port in use) | restarts |
| 130 | stopped by Ctrl-C; `train` has saved a checkpoint | |
| 141 | the reader of the output has gone, as `head` does; nothing is printed | |
| 143 | stopped by SIGTERM; `train` has saved a checkpoint | |

75 is `EX_TEMPFAIL` of sysexits.h. Classes are looked up by name in `sys.modules`: an error can only be of a
class that has been imported, and `karvan version` does not wait for torch.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from karvan.outages import is_temporary

if TYPE_CHECKING:
    from karvan.settings import SettingsError

OK, FAILED, USAGE, DAMAGED, TEMPORARY, INTERRUPTED, PIPE_CLOSED, TERMINATED = 0, 1, 2, 3, 75, 130, 141, 143
_PACKAGE = str(Path(__file__).parent)
_CHECKS = (ValueError, TypeError, KeyError, NotImplementedError)  # raised for wrong arguments


class _Training:
    """Whether this process has made a training step."""

    started = False


def note_training() -> None:
    """A step was made: from now on, an error may depend on what was trained."""
    _Training.started = True


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    if _is_of_data(error) or isinstance(error, OSError) or _is(error, "karvan.distributed", "RankError"):
        if _is(error, "karvan.distributed", "RankError") or is_temporary(error):
            return TEMPORARY
        return DAMAGED if _is_of_data(error) or _is_missing(error) else FAILED
    if _is_of_settings(error):
        return DAMAGED if error.unreadable else USAGE
    if _is_of_owner(error):
        return USAGE
    if _is(error, "karvan.train", "TerminatedError"):
        return TERMINATED
    return FAILED


def code_of_program(error: BaseException) -> int:
    """The exit code of a program that a job runs: wrong arguments before training are wrong each time."""
    if is_ours(error):
        code = code_of(error)
        wrong = code == FAILED and isinstance(error, _CHECKS) and not _Training.started
        return USAGE if wrong else code
    return TEMPORARY if is_temporary(error) else FAILED


def is_ours(error: BaseException) -> bool:
    """Whether Karvan has raised the error, of its own class or by a check: it needs no traceback."""
    if type(error).__module__.partition(".")[0] == "karvan":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    is_message = isinstance(error, (*_CHECKS, RuntimeError, OSError))
    return is_message and bool(frames) and _is_of_package(frames[-1].filename)


def text_of(error: BaseException, hint: str = "--debug") -> str:
    """One or two lines for the user: what was expected, what was received, and where, if that helps.

    hint: the option that shows the traceback.
    """
    explained = (
        _is_of_settings(error) or _is_of_owner(error) or _is(error, "karvan.system_limits", "LimitError")
    )
    if code_of(error) in (DAMAGED, TEMPORARY) or explained:
        return plain(error)
    kind = type(error).__name__
    is_message = isinstance(error, ValueError | TypeError | KeyError | RuntimeError)
    text = plain(error) if is_message and plain(error) else f"{kind}: {plain(error)}".removesuffix(": ")
    return f"{text}\n({kind} in {origin_of(error)}; {hint} shows the traceback)"


def plain(error: BaseException) -> str:
    """The text of an error alone."""
    if isinstance(error, KeyError) and error.args:  # str() of a KeyError puts quotes around its text
        return str(error.args[0])
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error).strip()


def _is_missing(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError)


def _is_of_data(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and isinstance(getattr(error, "temporary", None), bool):
        return True  # another process of the job could not read its data
    return _is(error, "karvan.checkpoint", "CheckpointError") or _is(error, "karvan.data", "DataError")


def _is_of_settings(error: BaseException) -> TypeGuard[SettingsError]:
    return _is(error, "karvan.settings", "SettingsError")


def _is_of_owner(error: BaseException) -> bool:
    return _is(error, "karvan.owner", "OwnerError")


def _is(error: BaseException, module: str, name: str) -> bool:
    # A class whose module is not imported cannot be that of the error.
    return module in sys.modules and isinstance(error, getattr(sys.modules[module], name, ()))


def _is_of_package(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def origin_of(error: BaseException) -> str:
    """File and line of the program that raised an error, of a library if it was no line of the program."""
    frames = traceback.extract_tb(error.__traceback__)
    # A line of the user's own file says more than one of the library that it called.
    own_frames = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename
        and not _is_of_package(frame.filename)
        and not frame.filename.startswith("<frozen")
    ]
    frame = (own_frames or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
