"""`karvan launch`: run a job of several roles on this machine."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from karvan.cli.config.target import pairs
from karvan.cli.errors import DAMAGED, OK, TEMPORARY, CommandError
from karvan.cli.output import help_of, print_table
from karvan.system_limits import require_limits

if TYPE_CHECKING:
    from karvan.discovery.registry import Registry
    from karvan.launch.job_spec import JobSpec
    from karvan.launch.role_commands import Commands
    from karvan.launch.supervision import supervisor as jobs
    from karvan.owner import Ownership


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("launch", help=help_of(launch))(launch)


def launch(
    target: Path | None = typer.Argument(
        None, metavar="JOB.yaml", help="The description of the job; see --example.", show_default=False
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Override a key: roles.trainers=4."
    ),
    check: bool = typer.Option(False, "--check", help="Show the roles and their commands; start nothing."),
    example: bool = typer.Option(False, "--example", help="Print a job to start from."),
) -> int:
    """Run a job of trainers, parameter servers, embedding workers and loaders on this machine.

    A process that dies is restarted; after the death of a trainer or a parameter server the job resumes from
    the newest checkpoint. Ctrl-C and SIGTERM stop all roles, trainers first, which save a checkpoint; a
    second Ctrl-C kills them. The same command resumes the job. Ctrl-Z suspends all roles, `fg` resumes them.

    \b
    Examples:
      karvan launch --example > job.yaml
      karvan launch job.yaml --check
      karvan launch job.yaml --set roles.trainers=4 --set staleness=8

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

    from karvan.job.environment import check_names
    from karvan.launch.job_spec import read_spec
    from karvan.launch.role_commands import commands_of

    try:
        check_names()
    except ValueError as error:
        raise CommandError(str(error)) from error
    spec = read_spec(target, changes)
    for path in spec.files():
        if not path.is_file():
            raise CommandError(f"{target}: there is no file {path}.", DAMAGED)
    _check_token_file(spec)
    commands = commands_of(spec)
    if check:
        _show(spec, commands)
        return OK
    require_limits(sum(spec.of_role(role).replicas for role in commands))
    from karvan.launch.token import with_token

    with ExitStack() as stack:
        owner = stack.enter_context(_owned(spec))
        try:
            spec = stack.enter_context(with_token(spec))
        except ValueError as error:
            raise CommandError(str(error)) from error
        registry = stack.enter_context(closing(_registry(spec)))
        return supervise(spec, registry, commands, owner=owner)


def supervise(
    spec: JobSpec,
    registry: jobs.RegistryView,
    commands: Commands,
    timing: jobs.Timing | None = None,
    owner: Ownership | None = None,
) -> int:
    """Run a job with the local engine until it ends or a signal stops it; returns its exit code."""
    from karvan.launch.engines.base import name_of
    from karvan.launch.engines.local import LocalEngine
    from karvan.launch.merged_logs import MergedLogs
    from karvan.launch.supervision.supervisor import Supervisor, Timing

    names = [name_of(role, index) for role in commands for index in range(spec.of_role(role).replicas)]
    with closing(MergedLogs(names, spec.logs)) as logs:
        lease = "" if owner is None else owner.id
        job = Supervisor(spec, LocalEngine(logs.write), registry, logs, commands, timing or Timing(), lease)
        if owner is not None:
            owner.on_lost(lambda: job.interrupt(signal.SIGTERM))
        with logs.warnings(), _signals_to(job):
            if spec.token_file is not None:
                logs.say(f"Registry at {registry.address}, token file {spec.token_file}.")
            outcome = job.run()
    if owner is not None:
        owner.check()
    if outcome.failure is not None:
        raise CommandError(outcome.failure, outcome.code)
    return outcome.code


@contextmanager
def _owned(spec: JobSpec) -> Iterator[Ownership | None]:
    """The launcher owns the folder of checkpoints, for all processes of the job."""
    from karvan.owner import own

    if spec.checkpoints is None:
        yield None
        return
    owner = own(spec.checkpoints)
    try:
        if not os.access(spec.checkpoints, os.W_OK | os.X_OK) or not spec.checkpoints.is_dir():
            raise CommandError(
                f"checkpoints expects a folder that this user may write to, got {spec.checkpoints}.", DAMAGED
            )
        yield owner
    finally:
        owner.release()


def _check_token_file(spec: JobSpec) -> None:
    """Report a bad token before anything starts, by the job's own key."""
    if spec.token_file is None:
        return
    from karvan.wire.security.token_file import MOST_CHARACTERS, check_token

    with spec.token_file.open("rb") as file:
        content = file.read(2 * MOST_CHARACTERS)
    try:
        check_token(content, "token_file expects", f"got {spec.token_file}, which")
    except ValueError as error:
        raise CommandError(str(error)) from error


def _registry(spec: JobSpec) -> Registry:
    from karvan.discovery.registry import Registry
    from karvan.job.roles import START_ORDER
    from karvan.launch.role_environment import security_of
    from karvan.wire import ListenError, Security

    replicas = {role: spec.of_role(role).replicas for role in START_ORDER}
    security = Security.from_environment(security_of(spec))
    try:
        return Registry(spec.host, spec.registry_port, security, replicas=replicas)
    except ListenError as error:
        raise CommandError(str(error), TEMPORARY) from error


@contextmanager
def _signals_to(job: jobs.Supervisor) -> Iterator[None]:
    # A terminal that is closed stops the job like SIGTERM, unless nohup says otherwise.
    caught = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del caught[signal.SIGHUP]
    before = {
        number: signal.signal(number, lambda got, frame: job.interrupt(caught[signal.Signals(got)]))
        for number in caught
    }
    if signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, lambda got, frame: job.suspend())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(spec: JobSpec, commands: Commands) -> None:
    print_table(
        f"Job {spec.name}: mode {spec.mode}, staleness {spec.staleness}, wire {spec.wire}",
        ["role", "replicas", "command"],
        [(role, spec.of_role(role).replicas, shlex.join(command)) for role, command in commands.items()],
        right=["replicas"],
    )
