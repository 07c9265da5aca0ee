"""`shared_result`: what several processes of pytest need, and only the first of them computes."""

import fcntl
import os

import torch


def shared_result(tmp_path_factory, name, make):
    """A folder that all processes share, and what `make(folder)` returned in the first that came here.

    Tests of a module are divided among processes, so that each of them sets up the module's fixtures.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, result = base / name, base / f"{name}.pt"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            folder.mkdir(exist_ok=True)
            unfinished = base / f"{name}.part"
            torch.save(make(folder), unfinished)
            unfinished.rename(result)
    return folder, torch.load(result, weights_only=False)
