"""Threads on each of which torch uses one core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch


def start(loops: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    """Run each loop on a separate thread.

    Torch would give each of them as many helpers as there are cores, and those of all would crowd out each
    other and the caller's. The number of helpers holds for the thread that sets it and, here unwanted, for
    threads that start afterwards: so it is set back when all have started.
    """
    started = threading.Barrier(len(loops) + 1)

    def run(loop: Callable[[], None]) -> None:
        torch.get_num_threads()  # a thread's first call takes over what holds for new threads
        torch.set_num_threads(1)
        started.wait()
        loop()

    helpers = torch.get_num_threads()
    threads = [threading.Thread(target=run, args=(loop,), name="karvan-data", daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    started.wait()
    torch.set_num_threads(helpers)
    return threads
