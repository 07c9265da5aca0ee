"""How many cores there are, and how many the native core uses."""

import os

from karvan import _native


def set_num_threads(count: int) -> None:
    """Use `count` threads for lookups and updates; results do not depend on it.

    The default is the number of cores this process may run on. Native threads sleep between calls and
    torch's sleep during them, so both may have all cores. Processes that share a machine should share its
    cores out.
    """
    _native.set_thread_count(count)


def get_num_threads() -> int:
    """The number of threads that lookups and updates use."""
    return _native.thread_count()


def cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
