"""Runs a function in several real processes that talk over gloo, and gives what each returned.

`run(world, "module:function", …)` starts Python processes; the function gets the keyword arguments that JSON
can carry, and returns something that `torch.save` can.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(world, function, folder, **arguments):
    """The processes, started; each writes its result to folder/RANK.pt."""
    port = free_port()
    started = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, function, str(folder), json.dumps(arguments)]
        output = (Path(folder) / f"{rank}.log").open("wb")
        started.append(
            subprocess.Popen(command, env=environment, cwd=HERE, stdout=output, stderr=subprocess.STDOUT)
        )
    return started


def run(world, function, timeout=120, **arguments):
    """What each rank returned."""
    for _ in range(3):
        codes, logs, results = _run(world, function, timeout, arguments)
        if "EADDRINUSE" not in logs:  # somebody else was faster
            break
    assert not any(codes), logs
    return results


def _ended(processes, timeout):
    """How they end; who has not in time, or soon after another has failed, counts as failed."""
    until = time.monotonic() + timeout
    while (codes := [process.poll() for process in processes]).count(None) and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + 20)
        time.sleep(0.02)
    return [-1 if code is None else code for code in codes]


def _run(world, function, timeout, arguments):
    with tempfile.TemporaryDirectory() as folder:
        processes = start(world, function, folder, **arguments)
        try:
            codes = _ended(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        logs = "\n".join((Path(folder) / f"{rank}.log").read_text() for rank in range(world))
        results = (
            []
            if any(codes)
            else [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
        )
    return codes, logs, results


def main():
    name, folder, arguments = sys.argv[1:]
    module, function = name.split(":")
    sys.path.insert(0, str(HERE))
    result = getattr(__import__(module), function)(**json.loads(arguments))
    torch.save(result, Path(folder) / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
