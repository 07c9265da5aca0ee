"""`karvan launch`: run a job of several roles, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import shlex
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from karvan.cli.config.target import pairs
from karvan.cli.errors import DAMAGED, INTERRUPTED, OK, TERMINATED, CommandError
from karvan.cli.output import print_table
from karvan.job.checkpoint_url import shown, url_of
from karvan.system_limits import require_limits

if TYPE_CHECKING:
    from karvan.launch.health import Timing
    from karvan.launch.job_spec import JobSpec
    from karvan.launch.role_programs import Commands


def launch(
    target: Path | None = typer.Argument(
        None, metavar="JOB.yaml", help="The description of the job; see --example.", show_default=False
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Override a key: roles.trainers=4."
    ),
    check: bool = typer.Option(False, "--check", help="Show the roles and their commands; start nothing."),
    detach: bool = typer.Option(
        False, "--detach", help="Leave the job running, and return once all its processes have started."
    ),
    engine: str = typer.Option(
        "local", metavar="local|ray", help="Where roles run: this machine, or the nodes of a Ray cluster."
    ),
    address: str | None = typer.Option(
        None,
        metavar="ADDRESS",
        help="The Ray cluster: auto or host:port, or RAY_ADDRESS; without one, the job starts its own here.",
        show_default=False,
    ),
    example: bool = typer.Option(False, "--example", help="Print a job to start from."),
) -> int:
    """Run a job of several processes, or resume it.

    A job has trainers and parameter servers, and optionally embedding workers and loaders.

    A process that dies is restarted; after the death of a trainer or a parameter server the job resumes from
    the newest checkpoint. Ctrl-C and SIGTERM stop all roles, trainers first, which save a checkpoint; a
    second Ctrl-C kills them. The same command resumes the job. Ctrl-Z suspends all roles, `fg` resumes them.
    The job itself is run by a master, a process of its own, which is restarted where it was if it dies. With
    --detach the job needs this command no more: see `karvan status`, `karvan logs` and `karvan stop`. All of
    it is on this machine, or, with --engine ray, on the nodes of the cluster, also the master.

    \b
    Examples:
      karvan demo --data out/clicks            # data
      karvan train --example > my.yaml         # what trainers run
      karvan launch --example > job.yaml
      karvan launch job.yaml
      karvan launch job.yaml --check
      karvan launch job.yaml --set roles.trainers=4 --set staleness=8
      karvan launch job.yaml --detach
      karvan launch job.yaml --engine ray --address auto

    \b
    Exit codes: 0 all trainers are done, 1 too many deaths,
    2 or 3 a role ended with it, 75 a temporary failure outlasted
    all restarts, 130 Ctrl-C, 143 SIGTERM.
    """
    if example:
        print(resources.files("karvan.launch").joinpath("example.yaml").read_text(), end="")
        return OK
    if target is None:
        raise CommandError("Expected a JOB.yaml, got nothing; --example prints one to start from.")
    changes = pairs(settings)

    from karvan.job.environment import warn_of_misspelled
    from karvan.launch.engines.choice import check_engine
    from karvan.launch.job_spec import read_spec
    from karvan.launch.role_programs import commands_of

    warn_of_misspelled(os.environ)
    spec = read_spec(target, changes)
    for path in spec.files():
        if not path.is_file():
            raise CommandError(f"{target}: there is no file {path}.{_how_to_get(path, spec)}", DAMAGED)
    if spec.system == "persia":
        spec = _with_its_configuration(spec)
    _check_token_file(spec)
    if engine == "ray":
        address = address or os.environ.get("RAY_ADDRESS") or None
    try:
        check_engine(engine, spec, address)
    except ValueError as error:
        raise CommandError(str(error)) from error
    commands = commands_of(spec)
    if check:
        _show(spec, commands)
        return OK
    require_limits(sum(spec.of_role(role).replicas for role in commands))
    code = follow(spec, commands, detach=detach, engine=engine, address=address)
    if code in (INTERRUPTED, TERMINATED):
        print(_how_to_resume(spec.checkpoints, shlex.join(["karvan", *sys.argv[1:]])), file=sys.stderr)
    return code


def _how_to_resume(checkpoints: Path | None, command: str) -> str:
    """What a job that was stopped has saved, and how to go on."""
    if checkpoints is None:
        return f"The job was stopped. It has no folder of checkpoints, so {command} starts again."
    if url_of(checkpoints) is not None:
        where = f"Its checkpoints are at {shown(checkpoints)}"
    elif newest := max(checkpoints.glob("step-*"), default=None):
        where = f"Its newest checkpoint is {newest}"
    else:
        where = "Nothing was saved yet"
    return f"The job was stopped. {where}.\nTo resume: {command}"


def _how_to_get(path: Path, spec: JobSpec) -> str:
    if path != spec.entry:
        return ""
    if path.suffix == ".py":
        return " It is the job's entry: the program that trainers run."
    return (
        f" It is the job's entry, a config. To write one: karvan train --example > {shlex.quote(str(path))}"
    )


def follow(
    spec: JobSpec,
    commands: Commands,
    timing: Timing | None = None,
    *,
    detach: bool = False,
    engine: str = "local",
    address: str | None = None,
) -> int:
    """Start a job, and follow it to its end, or until it runs if it is detached; returns its exit code."""
    from karvan.launch.launcher import Launcher
    from karvan.launch.run_folder import RunFolderError

    try:
        launcher = Launcher(spec, commands, timing=timing, detach=detach, engine=engine, address=address)
        outcome = launcher.run()
    except RunFolderError as error:
        raise CommandError(str(error)) from error
    if outcome is None:
        print(
            f"Job {spec.name} runs. Follow it: karvan logs {spec.name} --follow. See it: karvan status "
            f"{spec.name}. Stop it: karvan stop {spec.name}."
        )
        return OK
    if outcome.failure is not None:
        raise CommandError(outcome.failure, outcome.code)
    return outcome.code


def _with_its_configuration(spec: JobSpec) -> JobSpec:
    """A job of PERSIA with the limits of its global_config.yml; a wrong file is an error before it starts."""
    from karvan.compat.persia.config import EMBEDDING_CONFIG, read_slots, with_global_config
    from karvan.compat.unsupported import UnsupportedError

    try:
        read_slots(spec.roles.trainers.env.get(EMBEDDING_CONFIG))
        return with_global_config(spec)
    except UnsupportedError as error:
        raise CommandError(str(error)) from error


def _check_token_file(spec: JobSpec) -> None:
    """Report a bad token before anything starts, by the job's own key."""
    if spec.token_file is None:
        return
    from karvan.wire.security import MOST_CHARACTERS, check_token

    with spec.token_file.open("rb") as file:
        content = file.read(2 * MOST_CHARACTERS)
    try:
        check_token(content, "token_file expects", f"got {spec.token_file}, which")
    except ValueError as error:
        raise CommandError(str(error)) from error


def _show(spec: JobSpec, commands: Commands) -> None:
    print_table(
        f"Job {spec.name}: mode {spec.mode}, staleness {spec.staleness}, wire {spec.wire}",
        ["role", "replicas", "command"],
        [(role, spec.of_role(role).replicas, shlex.join(command)) for role, command in commands.items()],
        right=["replicas"],
    )
