"""A PERSIA job for tests: a registry, and roles that persia-launcher starts, with a file for each output."""

import contextlib
import os
import sys
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired

from forked_programs import ForkedProgram

from karvan.discovery.registry import Registry

LAUNCHER = "import sys; from karvan.cli.persia_launcher import main; sys.exit(main(sys.argv[1:]))"


class PersiaJob:
    """Processes of a job, and their registry."""

    program = ForkedProgram

    def __init__(self, folder, files, **environment):
        self.folder = folder
        self.registry = Registry()
        self.processes = {}
        self.environment = environment
        for name, text in files.items():
            (folder / name).write_text(text)

    def start(self, role, *arguments):
        environment = {
            **os.environ,
            "PERSIA_NATS_URL": f"nats://{self.registry.address}",
            "PERSIA_EMBEDDING_CONFIG": str(self.folder / "embedding.yml"),
            "KARVAN_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }
        output = open(self.folder / f"{role}-{len(self.processes)}.txt", "w+")  # noqa: SIM115
        command = [sys.executable, "-c", LAUNCHER, role, *map(str, arguments)]
        process = self.program(command, env=environment, stdout=output, stderr=STDOUT)
        self.processes[process] = output
        return process

    def output(self, process):
        return Path(self.processes[process].name).read_text()

    def wait(self, process, seconds=300):
        assert process.wait(seconds) == 0, self.output(process)
        return self.output(process)

    def close(self):
        for process in self.processes:
            process.terminate()  # so that a launcher ends its trainers
        for process, output in self.processes.items():
            with contextlib.suppress(TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
            output.close()
        self.registry.close()

    def run(self, roles, order):
        """Start all roles in this order; what trainers and loaders print until they end."""
        ended = []
        for role in order:
            for arguments in roles[role]:
                process = self.start(role, *(str(each).format(folder=self.folder) for each in arguments))
                if role in ("nn-worker", "data-loader"):
                    ended.append(process)
        return "".join(self.wait(process) for process in ended)
