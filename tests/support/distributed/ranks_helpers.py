"""Runs a function in several real processes that talk over gloo, and gives what each returned.

`run(world, "module:function", …)` hands the function to ranks that live as long as pytest does. It gets the
keyword arguments, and returns something that `torch.save` can. Afterwards each rank is made like a new
process again (`_renew`). A rank for which that fails is replaced, and all are when one has failed or did not
answer in time. `start` starts other processes, for tests of how they end.
"""

import atexit
import gc
import io
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from forked_programs import fork_context, prepare_fork
from free_ports import free_port

import karvan as kv
from karvan import distributed, native

HERE = Path(__file__).parent
_LAST_WORK = 2.0  # seconds that a thread may need to end after a call
_PATIENCE = 20.0  # seconds for what a rank does between two calls, on a busy machine
_ranks = []  # the pool


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


def run(world, function, timeout=120, **arguments):
    """What each rank returned."""
    for _ in range(3):
        results, logs = _run(world, function, timeout, arguments)
        if "EADDRINUSE" not in logs:  # somebody else was faster
            break
    assert None not in results, logs
    return [torch.load(io.BytesIO(result), weights_only=False) for result in results]


def _run(world, function, timeout, arguments):
    """What each rank has saved, None where it has failed or not answered in time; and what they have said."""
    ranks = _living(world)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(world)]
        for rank, added, log in zip(ranks, environments(world), logs, strict=True):
            rank.call(dict(os.environ) | added, str(log), function, arguments)
        results = _results(ranks, timeout)
        if None in results:
            for rank in ranks:
                rank.kill()
        return results, "\n".join(log.read_text() if log.exists() else "" for log in logs)


def _results(ranks, timeout):
    """What they answer until then, or soon after another has failed."""
    until = time.monotonic() + timeout
    results = dict.fromkeys(rank.calls for rank in ranks)
    silent = set(results)
    while silent and (left := until - time.monotonic()) > 0:
        for calls in wait(silent, left):
            silent.remove(calls)
            with suppress(EOFError, OSError):  # the process has ended
                results[calls] = calls.recv()
            if results[calls] is None:
                until = min(until, time.monotonic() + 20)
    return list(results.values())


def _living(world):
    """So many ranks that are like new processes."""
    _ranks[:] = [rank for rank in _ranks if rank.is_new()]
    while len(_ranks) < world:
        _ranks.append(Rank())
    return _ranks[:world]


class Rank:
    """A process that calls the functions that it is handed, until pytest has ended in whatever way."""

    def __init__(self):
        self.new = True
        self.calls, calls = fork_context().Pipe()
        self.process = fork_context().Process(target=_serve, args=(calls,))
        self.process.start()
        calls.close()

    def call(self, *call):
        """Have it answer with what a function gives, and with "new" once nothing is left of the call."""
        self.new = False
        with suppress(OSError):  # it has ended, and gives no answer
            self.calls.send(call)

    def is_new(self):
        """Whether nothing is left of its last call; if something is, the rank is killed."""
        with suppress(EOFError, OSError):  # it has ended, or was killed
            self.new = self.new or (self.calls.poll(_PATIENCE) and self.calls.recv() == "new")
        if not self.new:
            self.kill()
        return self.new

    def kill(self):
        self.new = False
        self.process.kill()
        self.process.join()
        self.calls.close()


@atexit.register
def _end():
    for rank in _ranks:
        rank.calls.close()  # which ends the process
    for rank in _ranks:
        rank.process.join(_PATIENCE)
        rank.kill()


def _serve(calls):
    """The main function of a rank."""
    generator = torch.get_rng_state()
    with suppress(EOFError):  # pytest has ended
        while True:
            environment, log, function, arguments = calls.recv()
            prepare_fork(environment, HERE)
            random.seed()
            torch.set_rng_state(generator)
            before = _state()
            with open(log, "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            result = _saved(function, arguments)
            calls.send(result)
            if result is None:  # others wait for this rank until it has ended
                break
            _renew(before)
            calls.send("new")
    atexit._run_exitfuncs()  # which forks leave out


def _saved(name, arguments):
    """What a function of a module here returns, None if it fails."""
    file = io.BytesIO()
    try:
        torch.save(_function(name)(**arguments), file)
        result = file.getvalue()
    except BaseException:
        traceback.print_exc()
        result = None
    sys.stdout.flush()
    sys.stderr.flush()
    return result


def _renew(before):
    """Let go of all that a call may leave, or fail."""
    distributed.disconnect()
    if dist.is_initialized():
        dist.destroy_process_group()
    kv.train.reset_termination()
    gc.collect()
    for thread in _threads() - before["threads"]:
        thread.join(_LAST_WORK)
    after = _state()
    assert after == before, f"left {after}, was {before}"


def _threads():
    """All but that of the clock, which nothing ends."""
    return {thread for thread in threading.enumerate() if thread.name != "karvan-clock"}


def _state():
    """What a call has to leave as it was."""
    loggers = [each for name, each in logging.root.manager.loggerDict.items() if name.startswith("karvan")]
    return {
        "threads": _threads(),
        "processes": multiprocessing.active_children(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "size of files": resource.getrlimit(resource.RLIMIT_FSIZE),
        "logs": [(each.name, each.handlers[:]) for each in loggers if getattr(each, "handlers", None)],
        "torch": (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        "native threads": kv.get_num_threads() if native.is_built() else None,
    }


def _function(name):
    """A function of a module here."""
    module, function = name.split(":")
    return getattr(__import__(module), function)


if __name__ == "__main__":
    torch.save(
        _function(sys.argv[1])(**json.loads(sys.argv[3])), Path(sys.argv[2]) / f"{os.environ['RANK']}.pt"
    )
