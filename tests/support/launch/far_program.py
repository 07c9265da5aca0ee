"""Runs a process on the second of two machines: `python far_program.py ADDRESS JOB.yaml ENTRY`.

Prints what the process says, and its exit code.
"""

import sys
from pathlib import Path

from karvan.job.roles import Role
from karvan.launch.engines.base import Process
from karvan.launch.engines.choice import make_engine
from karvan.launch.job_spec import read_spec
from karvan.launch.role_programs import environment_of
from karvan.launch.run_folder import RunFolder

if __name__ == "__main__":
    address, job, entry = sys.argv[1:]
    spec = read_spec(Path(job), {"roles.trainers.resources": "{far: 0.1}"})
    with make_engine(
        "ray",
        lambda name, line: print(line, flush=True),
        spec,
        RunFolder(Path("run-folder")),
        address=address,
    ) as engine:
        environment = environment_of(spec, Role.TRAINER, 0, registry="127.0.0.1:1", generation=0)
        process = Process(Role.TRAINER, 0, (sys.executable, entry), environment)
        handle = engine.start(process, lambda process, code: None)
        print(handle.wait(), flush=True)
