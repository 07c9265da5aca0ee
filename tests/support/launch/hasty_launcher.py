"""`karvan launch JOB.yaml` with short silences: a process that hangs is replaced within seconds."""

import sys
from pathlib import Path

from karvan.cli.commands.jobs import follow
from karvan.cli.output import CommandError, print_error
from karvan.launch.health import Timing
from karvan.launch.job_spec import read_spec
from karvan.launch.role_programs import commands_of

if __name__ == "__main__":
    spec = read_spec(Path(sys.argv[1]), {})
    try:
        sys.exit(follow(spec, commands_of(spec), Timing(settle=15.0, lost=4.0)))
    except CommandError as error:
        print_error(str(error))
        sys.exit(error.code)
