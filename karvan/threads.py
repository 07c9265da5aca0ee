"""The number of cores and threads, and which threads the native core uses."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

from karvan.native import _native, is_built

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_on_threads(work: Callable[[Item], Result], items: Iterable[Item], most: int) -> list[Result]:
    """The results of `work` for all items, in their order, by up to so many threads; or the first's error.

    Ctrl-C ends the wait, and neither it nor the process's end waits for a thread that is stuck in a read, as
    those of `concurrent.futures` would.
    """
    waiting = deque(enumerate(items))
    results: list[Any] = [None] * len(waiting)
    errors: dict[int, BaseException] = {}

    def run() -> None:
        while waiting and not errors:
            try:
                number, item = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[number] = work(item)
            except BaseException as error:
                errors[number] = error

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(most, len(results)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results


def set_num_threads(count: int) -> None:
    """Set how many threads lookups and updates use.

    Results do not depend on it.

    The default is the number of cores this process may run on. Processes on one machine should divide its
    cores among them.

    Args:
        count: The number of threads.

    Example:
        >>> before = kv.get_num_threads()
        >>> kv.set_num_threads(1)
        >>> kv.get_num_threads()
        1
        >>> kv.set_num_threads(before)
    """
    _native.set_thread_count(count)


def get_num_threads() -> int:
    """Return how many threads lookups and updates use.

    Returns:
        The number of threads.

    Example:
        >>> kv.get_num_threads() >= 1
        True
    """
    return _native.thread_count()


def cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def share_torch_threads() -> bool:
    """Run operations of the process's first thread on torch's threads; whether torch has any to share.

    After an operation torch's threads spin for some milliseconds until the next one (14 ms on some x86
    machines). Threads of our own would compete for cores with threads that only wait: lookups took 1.8 times
    and updates twice as long there. While the two numbers of threads differ
    (`set_num_threads`, `torch.set_num_threads`), the native core uses its own threads. Where it is not built,
    there is nothing to share.
    """
    if not is_built():
        return False
    from karvan.torch_internals import openmp_addresses  # imports torch, which takes long

    addresses = openmp_addresses()
    if addresses is None:
        return False
    _native.share_team(*addresses)
    return True
