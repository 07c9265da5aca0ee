"""A launcher whose loaders are members of a registry, and trainers, too, if wanted.

python watched_program.py FOLDER [members]
"""

import sys
from pathlib import Path

from launch_helpers import QUICK, small_commands
from support_paths import support_path

from karvan.cli.commands.launch import supervise
from karvan.discovery.registry import Registry
from karvan.launch.job_spec import read_spec

if __name__ == "__main__":
    place = Path(sys.argv[1])
    spec = read_spec(place / "job.yaml", {})
    commands = small_commands(place)
    for role in ("loader", "trainer") if "members" in sys.argv else ("loader",):
        commands[role] = (sys.executable, str(support_path("launch/member_program.py")), str(place))
    sys.exit(supervise(spec, Registry(lost_after=3.0), commands, QUICK))
