"""`karvan launch` runs a job of several roles; `status`, `logs`, `scale` and `stop` are for jobs that run."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from karvan.cli.output import (
    DAMAGED,
    FAILED,
    INTERRUPTED,
    JSON_PATH,
    OK,
    TEMPORARY,
    TERMINATED,
    CommandError,
    print_table,
    refusing,
    write_json,
)
from karvan.cli.target import pairs
from karvan.display import ago_text, duration_text
from karvan.job.checkpoint_url import shown, url_of
from karvan.system_limits import require_limits

if TYPE_CHECKING:
    from pathlib import Path

    from karvan.launch.health import Timing
    from karvan.launch.job_calls import JobClient
    from karvan.launch.job_spec import JobSpec
    from karvan.launch.role_programs import Commands


def launch(
    target: Path | None = Argument(
        None, metavar="JOB.yaml", help="The description of the job; see --example."
    ),
    settings: list[str] = Option([], "--set", metavar="NAME=VALUE", help="Override a key: roles.trainers=4."),
    check: bool = Option(False, "--check", help="Show the roles and their commands; start nothing."),
    detach: bool = Option(
        False, "--detach", help="Leave the job running, and return once all its processes have started."
    ),
    engine: str = Option(
        "local", metavar="local|ray", help="Where roles run: this machine, or the nodes of a Ray cluster."
    ),
    address: str | None = Option(
        None,
        metavar="ADDRESS",
        help="The Ray cluster: auto or host:port, or RAY_ADDRESS; without one, the job starts its own here.",
    ),
    example: bool = Option(False, "--example", help="Print a job to start from."),
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
    from karvan.wire.security import token_in

    warn_of_misspelled(os.environ)
    spec = read_spec(target, changes)
    for path in spec.files():
        if not path.is_file():
            raise CommandError(f"{target}: there is no file {path}.{_how_to_get(path, spec)}", DAMAGED)
    if spec.system == "persia":
        spec = _with_its_configuration(spec)
    if spec.token_file is not None:  # a bad token is reported before anything starts, by the job's own key
        with refusing(ValueError):
            token_in(spec.token_file, "token_file")
    if engine == "ray":
        address = address or os.environ.get("RAY_ADDRESS") or None
    with refusing(ValueError):
        check_engine(engine, spec, address)
    commands = commands_of(spec)
    if check:
        _show_commands(spec, commands)
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

    with refusing(RunFolderError):
        launcher = Launcher(spec, commands, timing=timing, detach=detach, engine=engine, address=address)
        outcome = launcher.run()
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

    with refusing(UnsupportedError):
        read_slots(spec.roles.trainers.env.get(EMBEDDING_CONFIG))
        return with_global_config(spec)


def _show_commands(spec: JobSpec, commands: Commands) -> None:
    print_table(
        f"Job {spec.name}: mode {spec.mode}, staleness {spec.staleness}, wire {spec.wire}",
        ["role", "replicas", "command"],
        [(role, spec.of_role(role).replicas, shlex.join(command)) for role, command in commands.items()],
        right=["replicas"],
    )


_JOB = Argument(metavar="JOB", help="The job's name, or the path of its job.yaml.")
_POLL = 0.1  # seconds
_HIDDEN = 50  # lines; a master says a few for programs


def status(
    job: str | None = Argument(None, metavar="[JOB]", help="The job's name, or the path of its job.yaml."),
    json_path: str | None = JSON_PATH,
) -> int:
    """Show the processes of a launched job and how far it is; without JOB, all jobs of this user.

    Of a job that has ended it shows how. A process is `silent` if it sends no heartbeats, and `starting`
    until it sends its first one.

    \b
    Examples:
      karvan status
      karvan status clicks
      karvan status job.yaml --json -

    \b
    Exit codes: 0 shown, 3 there is no such job, 75 its master
    does not answer.
    """
    if job is None:
        return _show_all(json_path)
    with _known(job) as client:
        outcome = client.outcome()
        if not client.runs:
            ended = {
                "job": client.name,
                "state": "ended",
                **(outcome or _KILLED),
                "launched": client.job["launched"],
            }
            if not write_json(json_path, ended):
                print(f"Job {client.name}: {_end_text(outcome)}")
            return OK
        state = {**client.status(), "launched": client.job["launched"], "detached": client.job["detached"]}
    if not write_json(json_path, state):
        _show(state)
    return OK


def logs(
    job: str = _JOB,
    process: str | None = Argument(None, metavar="[ROLE-INDEX]", help="One process, such as trainer-0."),
    follow: bool = Option(False, "--follow", "-f", help="Show new lines until the job ends."),
    tail: int | None = Option(None, min=0, metavar="N", help="Only the last N lines."),
) -> int:
    """Show the log of a launched job, all processes together or one of them.

    The log of every process has two files of 64 MiB at most: older lines are gone. Logs of earlier runs of
    the same job come first.

    \b
    Examples:
      karvan logs clicks --tail 100
      karvan logs clicks trainer-0 --follow

    \b
    Exit codes: 0 shown, 3 there is no such job or process.
    """
    from karvan.job.roles import Role
    from karvan.launch.engines.local import log_of
    from karvan.launch.run_folder import MASTER

    with _known(job) as client:
        path = log_of(client.folder.shared, MASTER)
        if process is not None:
            names = sorted(log.stem for log in path.parent.glob("*.log"))
            if process not in names:
                raise CommandError(
                    f"Expected a process of job '{client.name}' that has a log ({', '.join(names)}), got "
                    f"'{process}'.",
                    DAMAGED,
                )
            path = log_of(client.folder.shared, process)
        shown = _print_log(path, tail, client if follow else None)
        if not shown and tail != 0:
            who = f"Job {client.name}" if process is None else f"{process} of job {client.name}"
            alone = process is not None and process.startswith(f"{Role.TRAINER}-") and process != "trainer-0"
            progress = " Only rank 0, which is usually trainer-0, shows progress." if alone else ""
            print(f"{who} has no lines.{progress}", file=sys.stderr)
    return OK


def scale(
    job: str = _JOB,
    roles: list[str] = Argument(metavar="ROLE=NUMBER", help="trainers=4."),
) -> int:
    """Change the number of trainers of a launched job while it runs.

    Joiners get the state of training from the others; those that leave finish their batch. The job must have
    `sharding: dynamic` and `roles.trainers: {min: 1, max: 4}`, or other bounds.

    \b
    Examples:
      karvan scale clicks trainers=4

    \b
    Exit codes: 0 requested, 2 not possible for this job, 3 there is
    no such job, 75 its master does not answer.
    """
    numbers = pairs(roles)
    if list(numbers) != ["trainers"] or not numbers["trainers"].isdigit():
        raise CommandError(f"Expected trainers=NUMBER, got {' '.join(roles)}.")
    with _known(job) as client:
        if not client.runs:
            raise CommandError(f"Job {client.name} does not run: {_end_text(client.outcome())}")
        client.scale(int(numbers["trainers"]))
    print(f"Job {client.name} will have {numbers['trainers']} trainers: see `karvan status {client.name}`.")
    return OK


def stop(
    job: str = _JOB,
    now: bool = Option(False, "--now", help="Kill all processes at once; nothing is saved."),
) -> int:
    """Stop a launched job, and wait for its end. Trainers save a checkpoint first.

    `karvan launch` with the same job resumes it. Of a job all of which was killed it removes the token and
    other files that only matter while a job runs.

    \b
    Examples:
      karvan stop clicks
      karvan stop job.yaml --now

    \b
    Exit codes: 0 the job has stopped, or had ended before, 3 there
    is no such job, 75 its master does not answer.
    """
    with _known(job) as client:
        if not client.runs:
            client.remove_leftovers()
            print(f"Job {client.name} does not run: {_end_text(client.outcome())}")
            return OK
        client.stop(now=now)
        while client.runs:
            time.sleep(_POLL)
        client.remove_secrets()
        print(f"Job {client.name}: {_end_text(client.outcome())}")
    return OK


_KILLED = {"code": None, "failure": "its processes were killed, or the machine was restarted", "ended": None}


@contextmanager
def _known(job: str) -> Iterator[JobClient]:
    from karvan.launch.job_calls import JobClient, MasterAwayError, RefusedByJobError, UnknownJobError
    from karvan.launch.run_folder import DamagedRunFolderError, RunFolderError

    with (
        refusing(RunFolderError, code=FAILED),
        refusing(RefusedByJobError),
        refusing(MasterAwayError, code=TEMPORARY),
        refusing(DamagedRunFolderError, UnknownJobError, code=DAMAGED),
    ):
        yield JobClient(job)


def _end_text(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return f"it ended without saying how: {_KILLED['failure']}. `karvan launch` resumes it."
    when = "" if outcome["ended"] is None else f", {ago_text(outcome['ended'])}"
    text = f"it ended with code {outcome['code']}{when}"
    if outcome["code"] in (130, 143):
        text = f"it was stopped, with code {outcome['code']}{when} (the same `karvan launch` resumes it)"
    return f"{text}: {outcome['failure']}" if outcome["failure"] else f"{text}."


def _show_all(json_path: str | None) -> int:
    from karvan.launch.job_calls import job_names

    rows = [_row(name) for name in job_names()]
    if not write_json(json_path, rows):
        print_table(
            None if rows else "No job was launched yet.",
            ["job", "state", "code", "launched"],
            [
                [
                    row["job"],
                    row["state"],
                    "" if row["code"] is None else row["code"],
                    "" if row["launched"] is None else ago_text(row["launched"]),
                ]
                for row in rows
            ],
            right=["code"],
        )
    return OK


def _row(name: str) -> dict[str, Any]:
    """A job among others: what is damaged of it concerns nobody else."""
    from karvan.launch.job_calls import JobClient
    from karvan.launch.run_folder import DamagedRunFolderError

    try:
        client = JobClient(name)
        outcome = client.outcome()
        state = "running" if client.runs else "ended" if outcome is not None else "killed"
    except (DamagedRunFolderError, OSError):
        return {"job": name, "state": "damaged", "code": None, "launched": None}
    code = None if outcome is None else outcome["code"]
    return {"job": name, "state": state, "code": code, "launched": client.job["launched"]}


def _show(state: dict[str, Any]) -> None:
    print(f"Job {state['job']}: {state['state']}, launched {ago_text(state['launched'])}")
    print(f"Mode {state['mode']}, generation {state['generation']}, master is process {state['master']}")
    hosts = {process["host"] for process in state["processes"]} - {""}
    columns = ["role", "pid", *(["host"] if len(hosts) > 1 else []), "state", "heartbeat", "does"]
    rows = [_process_row(process) for process in state["processes"]]
    print_table(None, columns, [[row[name] for name in columns] for row in rows], right=["pid", "heartbeat"])
    work = state["work"]
    if work is not None:
        epochs = "" if work["epochs"] in (None, -1) else f" of {work['epochs']}"
        print(
            f"Work: epoch {work['epoch'] + 1}{epochs}, tasks: {work['done']:,} of {work['tasks']:,} done, "
            f"{work['leased']:,} leased, {work['waiting']:,} waiting\n"
            f"      {work['records']:,} records, {work['bad_records']:,} bad ones skipped"
        )
        if work["to_predict"]:
            print(f"Prediction: {work['to_predict']:,} records are left.")
        if work["export"] != "none":
            print(f"The final checkpoint is {'complete' if work['export'] == 'done' else 'being made'}.")
        if work["failure"]:
            print(f"The work has failed: {work['failure']}")


def _process_row(process: dict[str, Any]) -> dict[str, str]:
    state, code, heartbeat = process["state"], process["code"], process["heartbeat"]
    return {
        "role": f"{process['role']}-{process['index']}",
        "pid": "" if process["pid"] is None else str(process["pid"]),
        "host": process["host"],
        "state": state if code in (None, 0) else f"{state}, code {code}",
        "heartbeat": "" if heartbeat is None else f"{duration_text(heartbeat)} ago",
        "does": process["activity"],
    }


def _print_log(path: Path, tail: int | None, client: JobClient | None) -> bool:
    """Print the lines of a log, and those that follow while a job runs; whether there were any."""
    from karvan.launch.engines.local import FollowedLog
    from karvan.launch.merged_logs import JOB, SEPARATOR

    first: deque[str] | None = deque(maxlen=tail)
    has_lines = False

    def show(line: str) -> None:
        nonlocal has_lines
        if line.startswith(f"{JOB}{SEPARATOR}"):
            return
        has_lines = True
        if first is None:
            print(line, flush=client is not None)
        else:
            first.append(line)

    # Lines for programs are not shown, so more are read than are wanted.
    lines = FollowedLog(path, write=show, tail=None if tail is None else tail + _HIDDEN)
    with suppress(KeyboardInterrupt):
        while True:
            runs = client is not None and client.runs
            lines.read(last=not runs)
            if first is not None:
                shown, first = first, None
                for line in shown:
                    print(line, flush=client is not None)
            if not runs:
                break
            time.sleep(_POLL)
    lines.close()
    return has_lines
