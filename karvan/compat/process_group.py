"""`process_group`: programs that make a process group of torch also run as a single process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from karvan.distributed import current, disconnect

_SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@contextmanager
def process_group() -> Iterator[None]:
    """Within it, a process that torchrun has not started has the environment of the only one of a group.

    At the end the environment is as before, and what was connected within it is disconnected.
    """
    alone = "WORLD_SIZE" not in os.environ
    before = {name: os.environ.get(name) for name in _SINGLE}
    grouped, connected = dist.is_initialized(), current().chosen
    if alone:
        os.environ.update(_SINGLE)
    try:
        yield
    finally:
        if not connected and current().chosen:
            disconnect()
        if not grouped and dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items() if alone else ():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
