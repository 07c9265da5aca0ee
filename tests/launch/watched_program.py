"""A launcher whose loaders are members of a registry: `python watched_program.py FOLDER`."""

import sys
from pathlib import Path

from launch_helpers import HERE, QUICK, small_commands

from karvan.cli.launch import supervise
from karvan.cluster.registry import Registry
from karvan.launch.spec import read_spec

if __name__ == "__main__":
    place = Path(sys.argv[1])
    spec = read_spec(place / "job.yaml", {})
    commands = small_commands(place)
    commands["loader"] = (sys.executable, str(HERE / "member_program.py"), str(place))
    sys.exit(supervise(spec, Registry(lost_after=3.0), commands, QUICK))
