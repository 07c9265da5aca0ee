"""Whether calls wait for the GPU."""

from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization():
    """Any call that waits for the GPU is an error, on every thread."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
