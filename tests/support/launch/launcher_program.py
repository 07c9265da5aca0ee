"""`karvan launch FOLDER/job.yaml` with small programs as its roles: `python launcher_program.py FOLDER`.

More words: --detach; quick, for another timing; names of roles that are members of the registry.
"""

import sys
from pathlib import Path

from launch_helpers import QUICK, small_commands
from support_paths import support_path

from karvan.cli.commands.jobs import follow
from karvan.cli.output import CommandError, print_error
from karvan.job.roles import start_order
from karvan.launch.job_spec import read_spec

if __name__ == "__main__":
    place = Path(sys.argv[1])
    spec = read_spec(place / "job.yaml", {})
    commands = small_commands(place)
    for role in [each for each in start_order() if each in sys.argv]:
        commands[role] = (sys.executable, str(support_path("launch/member_program.py")), str(place))
    timing = QUICK if "quick" in sys.argv else None
    try:
        sys.exit(follow(spec, commands, timing, detach="--detach" in sys.argv))
    except CommandError as error:
        print_error(str(error))
        sys.exit(error.code)
