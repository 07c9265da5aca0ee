"""Loaders as processes, and trainers that take their batches on threads."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from forked_programs import ForkedProgram

from karvan.cluster.loader_channel import leave_all
from karvan.cluster.loader_stream import from_loaders
from karvan.discovery.registry import Registry

PROGRAM = Path(__file__).parent / "loader_program.py"


class Loaders:
    """A registry and loaders; `command` has the arguments of `loader_program.py`, or is a whole command."""

    def __init__(self, count, *arguments, command=(), **environment):
        self.count = count
        self.registry = Registry()
        self._command = [sys.executable, *(command or [str(PROGRAM), *map(str, arguments)])]
        self._environment = {**os.environ, **environment, "KARVAN_REGISTRY": self.registry.address}
        self.processes = {}
        self._streams = weakref.WeakSet()
        for index in range(count):
            self.start(index)

    def start(self, index, **environment):
        self.processes[index] = ForkedProgram(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={
                **self._environment,
                **environment,
                "KARVAN_INDEX": str(index),
                "KARVAN_COUNT": str(self.count),
            },
        )

    def kill(self, index):
        process = self.processes[index]
        process.kill()
        process.communicate()

    def end(self, index):
        """Ask it to end; its exit code and what it said."""
        self.processes[index].send_signal(signal.SIGTERM)
        return self.wait(index)

    def wait(self, index):
        said = self.processes[index].communicate(timeout=60)[1]
        return self.processes[index].returncode, said

    def stream(self, rank=0, world=1, **options):
        os.environ["KARVAN_REGISTRY"] = self.registry.address
        try:
            made = from_loaders(rank=rank, world_size=world, loaders=self.count, **options)
            made._connect()  # finds the registry
            self._streams.add(made)
            return made
        finally:
            del os.environ["KARVAN_REGISTRY"]

    def streams(self, world, **options):
        return [self.stream(rank, world, **options) for rank in range(world)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in list(self._streams):
            leave_all(stream._channels)  # otherwise threads wait for these loaders until it is collected
        for index in self.processes:
            if self.processes[index].returncode is None:
                self.kill(index)
        self.registry.close()


def in_threads(works):
    """The results of functions that run at the same time; the first error is raised."""
    results, errors = {}, []

    def run(number, work):
        try:
            results[number] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a trainer waits for ever"
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(works))]


def take(source, count=None):
    """(number, ids) of the next batches, all of the epoch or some."""
    taken = []
    for batch in source if count is None or count > 0 else ():
        taken.append((batch.number, batch["id"].tolist()))
        if len(taken) == count:
            break
    return taken


def take_all(streams, count=None):
    """What each of several trainers takes at the same time."""
    return in_threads([lambda one=one: take(one, count) for one in streams])


def ids_of(taken):
    return sorted(each for trainer in taken for _, ids in trainer for each in ids)


def close_all(streams):
    in_threads([one.close for one in streams])
