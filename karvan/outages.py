"""Outages: temporary failures of disks, networks and ports.

A full disk, a file system that was mounted read-only, an unreachable server or a port in use are no fault of
the program: it is worth trying again. A missing file, a folder without permission or a damaged byte will be
the same next time.

Errors of Karvan that wrap others have an attribute `temporary`, which decides.
"""

from __future__ import annotations

import errno
import os
import random
import re
from typing import TypeVar

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
