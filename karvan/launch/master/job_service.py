"""`JobService`: the calls by which commands see and stop a running job.

    job_status    the processes of the job, what they do, and how far its leased work is
    scale_job     have another number of trainers
    stop_job      stop the job in order, as SIGTERM does: trainers save. `now` kills all processes instead

They are answered at the address of the registry, with the job's token and TLS.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from karvan.activity import ActivityReport
from karvan.discovery.directory import Member
from karvan.discovery.registry import Registry
from karvan.job.address import UNIX
from karvan.launch.supervision.processes import ManagedProcess
from karvan.launch.supervision.supervisor import Supervisor
from karvan.protocol.master import JOB_CALLS, JOB_STATUS, SCALE_JOB, STOP_JOB, JobStatus, ScaleJob, StopJob
from karvan.wire import Endpoint, Message, RefusedError, Request, Service, endpoints
from karvan.work.service import WorkService


class JobService(Service):
    """Answers the calls; `supervise` says whose job it is, once that is known."""

    name = "job"
    progresses = False

    def __init__(self) -> None:
        self._parts: tuple[Supervisor, Registry, WorkService] | None = None
        self.endpoints = endpoints(
            JOB_CALLS,
            Endpoint(JOB_STATUS, self._status),
            Endpoint(SCALE_JOB, self._scale),
            Endpoint(STOP_JOB, self._stop),
        )

    def supervise(self, supervisor: Supervisor, registry: Registry, work: WorkService) -> None:
        """Answer for this job from now on."""
        self._parts = supervisor, registry, work

    def close(self) -> None:
        """Nothing to close."""

    def _status(self, request: Request) -> Message[JobStatus]:
        supervisor, registry, work = self._job()
        members = {(member.role, member.index): member for member in registry.members()}
        activities = registry.activities()
        started = all(member.token for member in supervisor.members if member.wanted)
        return Message(
            JobStatus(
                job=supervisor.spec.name,
                state="stopping" if supervisor.stopping else "running" if started else "starting",
                mode=supervisor.spec.mode,
                generation=supervisor.generation,
                master=os.getpid(),
                processes=[
                    _described(
                        member,
                        members.get((member.role, member.index)),
                        activities.get((member.role, member.index)),
                    )
                    for member in supervisor.members
                ],
                work=work.progress(),
            )
        )

    def _scale(self, request: Request[ScaleJob]) -> Message:
        supervisor, _, _ = self._job()
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
        supervisor, _, _ = self._job()
        if not supervisor.stopping:
            supervisor.interrupt(signal.SIGTERM)
        if request.head.now:
            supervisor.interrupt(signal.SIGINT)  # the second one kills
        return Message({})

    def _job(self) -> tuple[Supervisor, Registry, WorkService]:
        if self._parts is None:
            raise RefusedError("expected a master that has started, got one that is just starting.")
        return self._parts


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
