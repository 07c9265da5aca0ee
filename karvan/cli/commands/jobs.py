"""`karvan status`, `karvan logs`, `karvan scale` and `karvan stop`: launched jobs of this user."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import typer

from karvan.cli.config.target import pairs
from karvan.cli.errors import DAMAGED, FAILED, OK, TEMPORARY, CommandError
from karvan.cli.output import JSON_PATH, print_table, write_json
from karvan.durations import ago_text, duration_text

if TYPE_CHECKING:
    from pathlib import Path

    from karvan.launch.job_calls import JobClient

_JOB = typer.Argument(metavar="JOB", help="The job's name, or the path of its job.yaml.", show_default=False)
_POLL = 0.1  # seconds
_HIDDEN = 50  # lines; a master says a few for programs


def status(
    job: str | None = typer.Argument(
        None, metavar="[JOB]", help="The job's name, or the path of its job.yaml.", show_default=False
    ),
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
    process: str | None = typer.Argument(
        None, metavar="[ROLE-INDEX]", help="One process, such as trainer-0.", show_default=False
    ),
    follow: bool = typer.Option(False, "--follow", "-f", help="Show new lines until the job ends."),
    tail: int | None = typer.Option(
        None, min=0, metavar="N", help="Only the last N lines.", show_default=False
    ),
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
    roles: list[str] = typer.Argument(metavar="ROLE=NUMBER", help="trainers=4.", show_default=False),
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
    now: bool = typer.Option(False, "--now", help="Kill all processes at once; nothing is saved."),
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

    try:
        yield JobClient(job)
    except DamagedRunFolderError as error:
        raise CommandError(str(error), DAMAGED) from error
    except UnknownJobError as error:
        raise CommandError(str(error), DAMAGED) from error
    except MasterAwayError as error:
        raise CommandError(str(error), TEMPORARY) from error
    except RefusedByJobError as error:
        raise CommandError(str(error)) from error
    except RunFolderError as error:
        raise CommandError(str(error), FAILED) from error


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
