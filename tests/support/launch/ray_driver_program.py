"""A master that starts one process on a Ray cluster: `python ray_driver_program.py ADDRESS UNATTENDED CODE`.

It prints the record of the process, its id, and the numbers that its first line has; then it waits for a line
of input. A process whose code begins with "# suspend" is suspended until then, and then killed; one whose
code begins with "# servers" is one of two servers.
"""

import json
import os
import sys
import threading
from pathlib import Path

from karvan.job.roles import Role
from karvan.launch.engines.base import Needs, Process
from karvan.launch.engines.ray.cluster import RayCluster
from karvan.launch.engines.ray.engine import RayEngine

if __name__ == "__main__":
    address, unattended, code = sys.argv[1:]
    lines, written = [], threading.Event()

    def write(name, line):
        if not line.startswith("Waiting for"):  # of the engine, on a busy machine
            lines.append(line)
            written.set()

    engine = RayEngine(
        write,
        RayCluster.connect(address, Path.cwd()),
        job=f"driven{os.getpid()}",
        launch="launch",
        needs=dict.fromkeys(Role, Needs(cpus=0.1)),
        replicas={Role.PARAMETER_SERVER: 2},
        unattended=float(unattended),
    )
    role = Role.PARAMETER_SERVER if code.startswith("# servers") else Role.TRAINER
    process = Process(role, 0, (sys.executable, "-uc", code), {"KARVAN_PROCESS": "driven"})
    handle = engine.start(process, lambda process, code: written.set())
    written.wait()
    family = [int(word) for word in lines[-1].split() if word.isdigit()]
    if code.startswith("# suspend"):
        handle.suspend()
    print(json.dumps({**handle.record, "pid": handle.pid, "family": family}), flush=True)
    sys.stdin.readline()
    if code.startswith("# suspend"):
        handle.resume()
        handle.kill()
        handle.wait()
