"""Runs a function in several real processes that talk over gloo, and gives what each returned.

`run(world, "module:function", …)` starts Python processes; the function gets the keyword arguments that JSON
can carry, and returns something that `torch.save` can. These processes are forks of one that has imported
torch, which takes seconds; `start` starts whole new ones, for tests of how processes end.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from forked_programs import fork_context, prepare_fork
from free_ports import free_port

HERE = Path(__file__).parent


def environments(world):
    """What torchrun would set for each rank."""
    port = free_port()
    for rank in range(world):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }


def start(world, function, folder, kind=subprocess.Popen, **arguments):
    """The processes, started; each writes its result to folder/RANK.pt.

    kind: `ForkedProgram`, for processes that are killed, but need not be new ones.
    """
    started = []
    for rank, added in enumerate(environments(world)):
        environment = {**os.environ, **added}
        command = [sys.executable, __file__, function, str(folder), json.dumps(arguments)]
        output = (Path(folder) / f"{rank}.log").open("wb")
        started.append(kind(command, env=environment, cwd=HERE, stdout=output, stderr=subprocess.STDOUT))
    return started


def fork(world, function, folder, **arguments):
    """Like `start`, but forked from a process that has imported torch."""
    context = fork_context()
    started = []
    for rank, added in enumerate(environments(world)):
        values = (
            dict(os.environ) | added,
            str(Path(folder) / f"{rank}.log"),
            function,
            str(folder),
            arguments,
        )
        process = context.Process(target=_forked, args=values, daemon=False)
        process.start()
        started.append(process)
    return started


def _forked(environment, log, function, folder, arguments):
    """The main function of a fork."""
    prepare_fork(environment, HERE)
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        call(function, folder, arguments)
    finally:
        atexit._run_exitfuncs()  # which forks leave out


def run(world, function, timeout=120, files=None, **arguments):
    """What each rank returned. files: a folder that they write to, which is emptied if they start again."""
    for again in range(3):
        if again and files is not None:
            shutil.rmtree(files)
            Path(files).mkdir()
        codes, logs, results = _run(world, function, timeout, arguments)
        if "EADDRINUSE" not in logs:  # somebody else was faster
            break
    assert not any(codes), logs
    return results


def _ended(processes, timeout):
    """How they end; who has not in time, or soon after another has failed, counts as failed."""
    until = time.monotonic() + timeout
    while (codes := [process.exitcode for process in processes]).count(None) and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + 20)
        time.sleep(0.02)
    return [-1 if code is None else code for code in codes]


def _run(world, function, timeout, arguments):
    with tempfile.TemporaryDirectory() as folder:
        processes = fork(world, function, folder, **arguments)
        try:
            codes = _ended(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        logs = "\n".join((Path(folder) / f"{rank}.log").read_text() for rank in range(world))
        results = (
            []
            if any(codes)
            else [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
        )
    return codes, logs, results


def call(name, folder, arguments):
    """Call a function of a module here, and write what it returns."""
    module, function = name.split(":")
    result = getattr(__import__(module), function)(**arguments)
    torch.save(result, Path(folder) / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    call(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
