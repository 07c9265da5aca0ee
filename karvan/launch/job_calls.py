"""The calls by which commands see and stop a running job: the master's answers, and the commands' side.

    job_status    the processes of the job, what they do, and how far its leased work is
    scale_job     have another number of trainers
    stop_job      stop the job in order, as SIGTERM does: trainers save. `now` kills all processes instead

They are answered at the address of the registry, with the job's token and TLS.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from karvan.errors import RefusedError, WireError
from karvan.job.address import UNIX
from karvan.launch.job_spec import JobSpec, read_spec
from karvan.launch.run_folder import RunFolder, RunFolderError, jobs_folder
from karvan.protocol.master import JOB_CALLS, JOB_STATUS, SCALE_JOB, STOP_JOB, JobStatus, ScaleJob, StopJob
from karvan.wire import Client, Endpoint, Message, Request, Security, Service, endpoints
from karvan.wire.schema import Call

if TYPE_CHECKING:
    from karvan.activity import ActivityReport
    from karvan.launch.processes import ManagedProcess
    from karvan.launch.supervisor import Supervisor
    from karvan.protocol.values import Member

A = TypeVar("A")

_DEADLINE = 10.0  # seconds for a call; a master that was killed is back sooner


class UnknownJobError(LookupError):
    """There is no such job; the text says which there are."""


class RefusedByJobError(ValueError):
    """What was asked of a job is not possible."""


class MasterAwayError(RuntimeError):
    """The job runs, but its master does not answer."""


class JobClient:
    """A job by its name, or by the path of its job.yaml."""

    def __init__(self, job: str) -> None:
        name = read_spec(Path(job), {}).name if job.endswith((".yaml", ".yml")) else job
        self.folder = RunFolder.of_job(name) if is_name(name) else RunFolder(Path(name))
        record = self.folder.job() if is_name(name) else None
        if record is None:
            others = job_names()
            others_ = f"there are: {', '.join(others)}" if others else "there are none"
            raise UnknownJobError(
                f"Expected the name of a launched job in {jobs_folder()}, got '{name}'; {others_}."
            )
        self.job: dict[str, Any] = record
        self.name = name

    @property
    def runs(self) -> bool:
        """Whether the job runs, or is about to start."""
        return self.folder.outcome() is None and self.folder.runs

    def outcome(self) -> dict[str, Any] | None:
        """How it has ended; None if it runs, or was killed."""
        return self.folder.outcome()

    def remove_secrets(self) -> None:
        """The job has ended: its token is of no use. A master on another machine cannot remove it here."""
        if self.outcome() is not None:
            self.folder.remove_files_of_the_run()

    def remove_leftovers(self) -> None:
        """Remove what killed processes of the job have left, unless somebody launches it again."""
        with suppress(RunFolderError), self.folder.launching():
            self.folder.remove_files_of_the_run()
            self.folder.remove_processes()

    def status(self) -> dict[str, Any]:
        """What its master says; a MasterAwayError if it does not answer."""
        return self._call(JOB_STATUS, {}).as_json()

    def scale(self, trainers: int) -> None:
        """Ask the master for another number of trainers."""
        self._call(SCALE_JOB, {"trainers": trainers})

    def stop(self, *, now: bool) -> None:
        """Ask the master to stop the job; now: to kill all its processes."""
        self._call(STOP_JOB, {"now": now})

    def _call(self, call: Call[Any, A], head: dict[str, Any]) -> A:
        from karvan.launch.role_programs import security_of

        master = self.folder.master()
        if master is None:
            raise MasterAwayError(
                f"Job '{self.name}' is starting: its master does not listen yet. Try again."
            )
        security = Security.from_environment(security_of(JobSpec.model_validate(self.job["spec"])))
        client = Client("master", master["address"], security, forgetful=True, deadline=_DEADLINE)
        try:
            return client.call(call, head).head
        except RefusedError as error:
            raise RefusedByJobError(f"Job '{self.name}': {str(error).removeprefix('master: ')}") from error
        except WireError as error:
            raise MasterAwayError(
                f"The master of job '{self.name}' at {master['address']} does not answer: {error} It is "
                f"restarted if it died: try again. `kill -CONT {master['pid']}` continues a stopped one."
            ) from error
        finally:
            client.close()


def is_name(name: str) -> bool:
    """Whether a text may be the name of a job."""
    return bool(name) and "/" not in name and not name.startswith(".")


def job_names() -> list[str]:
    """The names of all jobs of this user that have run."""
    return sorted(path.parent.name for path in jobs_folder().glob("*/job.json"))


class JobService(Service):
    """Answers the calls; `supervise` says whose job it is, once that is known."""

    name = "job"
    progresses = False

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self.endpoints = endpoints(
            JOB_CALLS,
            Endpoint(JOB_STATUS, self._status),
            Endpoint(SCALE_JOB, self._scale),
            Endpoint(STOP_JOB, self._stop),
        )

    def supervise(self, supervisor: Supervisor) -> None:
        """Answer for this job from now on."""
        self._supervisor = supervisor

    def _status(self, request: Request) -> Message[JobStatus]:
        supervisor = self._job()
        registry = supervisor.registry
        members = {(member.role, member.index): member for member in registry.members()}
        activities = registry.activities()
        started = all(member.token for member in supervisor.members if member.wanted)
        return Message(
            JobStatus(
                job=supervisor.spec.name,
                state="stopping" if supervisor.stopping else "running" if started else "starting",
                mode=supervisor.spec.mode,
                generation=supervisor.state.generation,
                master=os.getpid(),
                processes=[
                    _described(process, members.get(process.key), activities.get(process.key))
                    for process in supervisor.members
                ],
                work=supervisor.work.progress(),
            )
        )

    def _scale(self, request: Request[ScaleJob]) -> Message:
        supervisor = self._job()
        trainers, number = supervisor.spec.roles.trainers, request.head.trainers
        if not trainers.varies:
            raise RefusedError(
                f"its number of trainers is fixed, {trainers.replicas}: only jobs with sharding: dynamic and "
                "roles.trainers: {min: …, max: …} can be scaled."
            )
        if not trainers.least <= number <= trainers.most:
            raise RefusedError(f"expected {trainers.least} to {trainers.most} trainers, got {number}.")
        supervisor.scale(number)
        return Message({})

    def _stop(self, request: Request[StopJob]) -> Message:
        supervisor = self._job()
        if not supervisor.stopping:
            supervisor.interrupt(signal.SIGTERM)
        if request.head.now:
            supervisor.interrupt(signal.SIGINT)  # the second one kills
        return Message({})

    def _job(self) -> Supervisor:
        if self._supervisor is None:
            raise RefusedError("expected a master that has started, got one that is just starting.")
        return self._supervisor


def _described(
    process: ManagedProcess, member: Member | None, report: ActivityReport | None
) -> dict[str, Any]:
    handle = process.handle
    host = socket.gethostname()
    if member is not None and not member.address.startswith(UNIX):
        host = member.address.rpartition(":")[0] or member.address
    return {
        "role": process.role,
        "index": process.index,
        "pid": handle.pid if handle is not None and process.running else None,
        "host": host,
        "state": _state(process, member),
        "code": process.code,
        "generation": process.generation,
        "heartbeat": None if member is None or not process.running else member.silent,
        "activity": "" if report is None or not process.running else _activity(report),
    }


def _state(process: ManagedProcess, member: Member | None) -> str:
    if process.running:
        return "starting" if member is None else "running" if member.healthy else "silent"
    if not process.wanted:
        return "not wanted"
    if process.code is None or process.due is not None:
        return "restarting" if process.token else "starting"
    return "done" if process.code == 0 else "ended"


def _activity(report: ActivityReport) -> str:
    """What a process does, from its last heartbeat."""
    parts = [report.task] if report.task else []
    if waits := sorted(report.waits.items(), key=lambda wait: -wait[1]):
        parts.append(f"waits for {waits[0][0]} for {waits[0][1]:.0f} s")
    if report.idle >= 10:
        parts.append(f"no progress for {report.idle:.0f} s")
    return ", ".join(parts)[:300]
