"""`karvan launch FOLDER/job.yaml` with small programs as its roles: `python launcher_program.py FOLDER`."""

import sys
from pathlib import Path

from launch_helpers import Known, small_commands

from karvan.cli.commands.launch import supervise
from karvan.launch.job_spec import read_spec

if __name__ == "__main__":
    place = Path(sys.argv[1])
    spec = read_spec(place / "job.yaml", {})
    sys.exit(supervise(spec, Known(), small_commands(place)))
