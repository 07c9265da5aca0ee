"""`JobClient`: what commands know of a job, and their calls to its master."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from karvan.errors import RefusedError, WireError
from karvan.launch.job_spec import JobSpec, read_spec
from karvan.launch.run_folder import RunFolder, RunFolderError, jobs_folder
from karvan.protocol.master import JOB_STATUS, SCALE_JOB, STOP_JOB
from karvan.wire import Client, Security
from karvan.wire.schema import Call

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
