"""Parameter servers for tests: in threads of the test, at real ports, or in processes of their own."""

import contextlib
import os
import sys
import tempfile
import time

from forked_programs import ForkedProgram

from karvan import distributed
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.cluster.role_process import Generations
from karvan.discovery.registry import Registry
from karvan.wire import Server

TEMPORARY = tempfile.gettempdir()  # tests save below it


@contextlib.contextmanager
def serving(count, checkpoints=TEMPORARY, registry=""):
    """The addresses of so many servers, each with a port of its own, that save below a folder."""
    servers = [
        Server(ParameterServer(index, count, checkpoints=checkpoints, generations=Generations(registry)))
        for index in range(count)
    ]
    try:
        yield [server.address for server in servers]
    finally:
        distributed.disconnect()
        for server in servers:
            server.close(0.1)


class Processes:
    """A registry, and processes of roles that register with it."""

    def __init__(self, servers):
        self.registry = Registry()
        self.count = servers
        self.generation = 0
        self.processes = [self._start(index) for index in range(servers)]

    def environment(self):
        """For trainers."""
        return {
            "KARVAN_REGISTRY": self.registry.address,
            "KARVAN_PARAMETER_SERVER_COUNT": str(self.count),
            "KARVAN_GENERATION": str(self.generation),
        }

    def _start(self, index):
        command = [sys.executable, "-m", "karvan", "role", "parameter-server"]
        given = {"KARVAN_INDEX": str(index), "KARVAN_COUNT": str(self.count), "KARVAN_THREADS": "1"}
        given["KARVAN_CHECKPOINTS"] = TEMPORARY
        return ForkedProgram(command, env={**os.environ, **self.environment(), **given})

    def kill(self, index):
        """kill -9, and another one in its place."""
        self.processes[index].kill()
        self.processes[index].wait()
        self.registry.forget("parameter-server", index)
        self.processes[index] = self._start(index)

    def wait(self):
        """Until all are there."""
        until = time.monotonic() + 180
        while sum(member.role == "parameter-server" for member in self.registry.members()) < self.count:
            assert time.monotonic() < until
            time.sleep(0.02)

    def __enter__(self):
        self.wait()
        return self

    def __exit__(self, *exception):
        distributed.disconnect()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            assert process.wait(60) == 0
        self.registry.close()
