"""What the ranks do in `test_living_ranks.py`: leave things behind, and tell what they find."""

import os
import random
import signal
import threading

import torch
import torch.distributed as dist

import karvan as kv
from karvan import distributed


def leave(what=None):
    """What a call finds; it leaves much that can be undone, and something that cannot."""
    here = distributed.current()
    found = {
        "pid": os.getpid(),
        "world": (here.world_size, dist.is_initialized(), os.environ["WORLD_SIZE"]),
        "environment": os.environ.get("LEFT_BY_A_CALL"),
        "folder": os.path.basename(os.getcwd()),
        "random": torch.rand(2).tolist(),
        "threads": torch.get_num_threads(),
    }
    os.environ["LEFT_BY_A_CALL"] = "yes"
    os.chdir("/")
    random.seed(0)
    torch.manual_seed(1)
    torch.set_num_threads(2)
    kv.connect("sharded", timeout=60).main.barrier()
    if what == "a thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if what == "a signal handler":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return found


def fail(victim, how):
    """One rank raises an error, is killed or waits, while the others need it."""
    connection = kv.connect("sharded", timeout=60)
    if connection.rank != victim:
        connection.main.barrier()
    if how == "waits":
        threading.Event().wait()
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ZeroDivisionError("the victim fails")
