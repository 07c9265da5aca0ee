"""What an error means: whether it is temporary, its exit code, and the text that is printed for it.

Exit codes of commands and of launched programs:

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

import errno
import os
import random
import re
import sys
import traceback
from pathlib import Path
from typing import TypeVar

# Outages: temporary failures of disks, networks and ports.
#
# A full disk, a file system that was mounted read-only, an unreachable server or a port in use are no fault
# of the program: it is worth trying again. A missing file, a folder without permission or a damaged byte will
# be the same next time.
#
# Errors of Karvan that wrap others have an attribute `temporary`, which decides.

Failure = TypeVar("Failure", bound=BaseException)

_OUTAGE_NUMBERS = frozenset(
    number
    for name in (
        *("ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "EBUSY", "EAGAIN", "EINTR", "ENODEV", "ENXIO"),
        *("ETIMEDOUT", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE", "ENOTCONN", "ESHUTDOWN"),
        *("EHOSTUNREACH", "EHOSTDOWN", "ENETUNREACH", "ENETDOWN", "ENETRESET", "ENOLINK", "EREMOTEIO"),
        *("EADDRINUSE", "EADDRNOTAVAIL", "ENOMEDIUM", "ENOLCK"),
    )
    if (number := getattr(errno, name, None)) is not None
)


# What says that this process has no room: its memory, its disk, or the files that it may open.
_EXHAUSTION_NUMBERS = frozenset(
    getattr(errno, name) for name in ("ENOMEM", "ENOSPC", "EDQUOT", "EIO", "EROFS", "EMFILE", "ENFILE")
)
# A RuntimeError with such a text is torch's, for tensors on the CPU, or Python's, of a thread.
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory", "std::bad_alloc", "can't start new thread"
_ASKED_FOR = re.compile(r" size (\d+)")  # in Arrow's errors
_random = random.SystemRandom()  # Python's global generator belongs to the program, as do numpy's and torch's


def retry_delay(first: float, attempt: int, longest: float) -> float:
    """Seconds before the next attempt: doubled with each, and random, so that not all try at once."""
    return min(first * 2.0 ** min(attempt, 30), longest) * _random.uniform(0.5, 1.0)


def mark(error: Failure, temporary: bool) -> Failure:
    """The error of another process of the job, marked with whether it was an outage there."""
    error.__dict__["temporary"] = temporary
    return error


def is_temporary(error: BaseException) -> bool:
    """Whether an error is an outage: the same work may succeed later."""
    temporary = getattr(error, "temporary", None)
    if isinstance(temporary, bool):
        return temporary
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno in _OUTAGE_NUMBERS


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this process got no more memory; damaged bytes may ask for more than any machine has."""
    if isinstance(error, RuntimeError):
        return any(text in str(error) for text in _NO_MEMORY)
    if isinstance(error, MemoryError):
        asked = _ASKED_FOR.search(str(error))
        return not asked or int(asked[1]) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def is_exhausted(error: BaseException) -> bool:
    """Whether this process lacks memory or a disk to go on; what it was asked for is not to blame.

    Errors of Karvan that wrap others, such as that of a save, say themselves what they mean.
    """
    if isinstance(getattr(error, "temporary", None), bool):
        return False
    return is_out_of_memory(error) or (isinstance(error, OSError) and error.errno in _EXHAUSTION_NUMBERS)


OK, FAILED, USAGE, DAMAGED, TEMPORARY, INTERRUPTED, PIPE_CLOSED, TERMINATED = 0, 1, 2, 3, 75, 130, 141, 143
_PACKAGE = str(Path(__file__).parent)
_CHECKS = (ValueError, TypeError, KeyError, NotImplementedError)  # raised for wrong arguments
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_SETTINGS, _OWNER = "karvan.settings.SettingsError", "karvan.owner.OwnerError"


class Training:
    """Whether this process has made a training step, so that an error may depend on what was trained."""

    started = False


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    if _is(error, "karvan.distributed.RankError"):
        return TEMPORARY
    is_of_data = _is_of_data(error)
    if is_of_data or isinstance(error, OSError):
        if is_temporary(error):
            return TEMPORARY
        return DAMAGED if is_of_data or isinstance(error, _MISSING) else FAILED
    if _is(error, _SETTINGS):
        return DAMAGED if getattr(error, "unreadable", False) else USAGE
    if _is(error, _OWNER):
        return USAGE
    return TERMINATED if _is(error, "karvan.train.TerminatedError") else FAILED


def code_of_program(error: BaseException) -> int:
    """The exit code of a program that a job runs: wrong arguments before training are wrong each time."""
    if is_ours(error):
        code = code_of(error)
        wrong = code == FAILED and isinstance(error, _CHECKS) and not Training.started
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
    explained = _is(error, _SETTINGS, _OWNER, "karvan.system_limits.LimitError")
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


def _is_of_data(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and isinstance(getattr(error, "temporary", None), bool):
        return True  # another process of the job could not read its data
    return _is(error, "karvan.checkpoint.CheckpointError", "karvan.data.DataError")


def _is(error: BaseException, *classes: str) -> bool:
    """Whether it is of one of these classes; one whose module is not imported cannot be that of the error."""
    for module, _, name in (path.rpartition(".") for path in classes):
        if module in sys.modules and isinstance(error, getattr(sys.modules[module], name, ())):
            return True
    return False


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


# Errors of calls between processes; `karvan.wire` has the calls.


class WireError(ConnectionError):
    """A peer cannot be reached or does not answer in time; the message names it."""


class BusyError(WireError):
    """A service has no room for another caller at the moment; callers try again until their deadline."""


class PeerLostError(WireError):
    """A service has restarted and has lost what earlier calls gave it."""


class RefusedError(RuntimeError):
    """A service refuses a call: it is malformed, too large, not allowed, or of an older run of the job."""


class ListenError(OSError):
    """A service cannot listen at its port."""

    temporary = True
