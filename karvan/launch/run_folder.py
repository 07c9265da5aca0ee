"""The run folder of a job: what its launcher, its master and commands about it leave for each other.

A job of the name NAME has the folder `jobs_folder()/NAME`, which only its user may enter:

    job.json          the job: its spec and commands, and the record of the master's process
    lock              locked by a launcher while it starts the job
    master.lock       locked by the master while it lives: there is one
    master.json       the master's address, the same after a restart unless it is on another machine
    state.json        what the supervisor knows (`processes.py`)
    outcome.json      how the job has ended
    token             the job's token, unless it has a file of its own
    tls-*.pem         its certificate and key, if it listens at ports and has none of its own
    ROLE-INDEX.sock   the socket files of its services, if they listen at none
    sockets           a link to the folder of these files, if it is another one
    rendezvous.db     the keys of trainers that connect to each other
    work.db           the ledger of leased work, if the job has no folder of checkpoints
    group.json        the group of its trainers, if they come and go
    processes/        the files of keepers (`engines/local.py`)
    logs/             the output of every process; master-0.log has all lines, with the name of their process

After the job has ended, job.json, outcome.json and the logs remain, until the next start of the job.

The master of a job on a Ray cluster may run on any node, and move to another one. Then the files that it
writes itself, and the logs, are in a folder that all nodes see, `master/run-ID` in the folder of checkpoints:
the *shared* folder, which job.json names. The run folder itself, with the job and its token, stays on the
machine that launched the job; the node of the master has a copy in a temporary folder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from karvan.clock import clock
from karvan.files import DamagedFileError, read_object, replace_file
from karvan.job.address import holds_sockets
from karvan.job.environment import JobEnvironment, variable
from karvan.job.roles import Role
from karvan.launch.engines.base import name_of
from karvan.launch.engines.local import is_locked, keeper_lives
from karvan.system_limits import forbid_core_dumps

# The token of a launched job: a random one for every start, unless the job sets `token_file`.
#
# The token is 32 random bytes, in hex, in a file that only its owner may read (0600), in the job's run
# folder, which only its owner may enter (0700). Processes of the job get the path in KARVAN_TOKEN_FILE; the
# token itself is never an argument, an environment variable or a line of a log. The file is removed when the
# job ends, or cannot start. Processes that hold the token leave no core dumps. A job that is killed leaves
# the file behind, with a token that no later start accepts: its services died with it. `karvan stop` removes
# it, and the next start makes another one.
#
# Services of a job that listen at ports have a certificate as well, also a new one for every start, unless
# the job sets `tls`. Its files lie beside the token, and live as long.


_BYTES = 32
_NAME = "karvan-job"
_CLOCKS = timedelta(days=1)  # by which the clocks of machines may differ
_VALID = timedelta(days=3650)  # longer than any job


def make_token(path: Path) -> None:
    """Write a new token to this path, instead of the last one."""
    forbid_core_dumps()
    _write_token(path, f"{secrets.token_hex(_BYTES)}\n".encode())


def make_certificate(folder: Path) -> dict[str, Any]:
    """Write a key and its certificate, which is its own authority: who has the key belongs to the job.

    Returns the job's settings of TLS. Nobody needs to know the addresses of the job beforehand: callers
    expect the one name in the certificate, wherever they reach a service.
    """
    from cryptography import x509  # rarely needed, and slow to import
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(who, who, secret.public_key(), x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, SHA256())
    )
    key, cert = folder / "tls-key.pem", folder / "tls-cert.pem"
    _write_token(key, secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    _write_token(cert, certificate.public_bytes(Encoding.PEM))
    return {"cert": cert, "key": key, "ca": cert, "mutual": True, "name": _NAME}


def _write_token(path: Path, content: bytes) -> None:
    """Write a file that only this user may read, instead of the last one."""
    with suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


_log = logging.getLogger(__name__)

# Files of the shared folder.
OUTCOME = "outcome.json"
STATE = "state.json"
RENDEZVOUS = "rendezvous.db"
WORK = "work.db"
GROUP = "group.json"
MASTER = name_of(Role.MASTER, 0)
JOBS = variable("jobs")
# The fields of its files that others read, and their types.
_JOB = {
    **{"launched": str, "detached": bool, "spec": dict, "commands": dict},
    **{"shared": str | None, "master": dict | None},
}
_MASTER = {"address": str, "pid": int}
_OUTCOME = {"code": int, "failure": str | None, "ended": str}
_REMAIN = ("job.json", OUTCOME, "logs", "lock", "processes")
_RUN = "run-"
_SOCKETS = "sockets"
_LOCK_WITHIN = 3.0  # seconds; a command that looks whether the master lives holds its lock for a moment


class RunFolderError(RuntimeError):
    """A run folder that cannot be used; the text says why, and what to do."""


class JobRunsError(RunFolderError):
    """The job runs already."""


class DamagedRunFolderError(RunFolderError):
    """A file of a run folder is not what was written, as after a loss of power."""


class RunFolder:
    """The run folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_job(cls, name: str) -> RunFolder:
        """That of a job of this user, which may not exist."""
        return cls(jobs_folder() / name)

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.path.name

    @property
    def token(self) -> Path:
        """The file of the job's own token."""
        return self.path / "token"

    def make_sockets(self) -> Path:
        """The folder of socket files: this one, if its file system has some and paths in it are short enough.

        Otherwise a temporary one, which is removed with the files of the run.
        """
        if holds_sockets(self.path):
            return self.path
        for parent in (tempfile.gettempdir(), "/tmp"):
            folder = Path(tempfile.mkdtemp(prefix="karvan-", dir=parent))
            if holds_sockets(folder):
                (self.path / _SOCKETS).symlink_to(folder)
                return folder
            folder.rmdir()
        raise RunFolderError(
            f"Services of a job need a folder for their sockets. The paths of {self.path}, "
            f"{tempfile.gettempdir()} and /tmp are too long, or these folders cannot hold sockets. Set "
            f"{JOBS} to another folder."
        )

    @property
    def shared(self) -> Path:
        """The folder of what the master writes: this one, unless the job names another."""
        job = self.job()
        return Path(job["shared"]) if job is not None and job.get("shared") else self.path

    @property
    def outcome_file(self) -> Path:
        """The file that exists once the job has ended for good."""
        return self.shared / OUTCOME

    # What is in it

    def job(self) -> dict[str, Any] | None:
        """What was launched; None if there is no such job."""
        return _read(self.path / "job.json", _JOB)

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Store what is launched."""
        _write(self.path / "job.json", job)

    def master(self) -> dict[str, Any] | None:
        """The master's address and process; None if none has started yet."""
        return _read(self.shared / "master.json", _MASTER)

    def write_master(self, address: str) -> None:
        """Store the address of this process, the master; a full disk may keep that of the last one, if it is
        the same.
        """
        try:
            _write(self.shared / "master.json", {"address": address, "pid": os.getpid()})
        except OSError as error:
            if (self.master() or {}).get("address") != address:
                raise
            _log.warning("The number of the master's process could not be stored: %s.", error.strerror)

    def outcome(self) -> dict[str, Any] | None:
        """How the job has ended; None if it has not, or was killed."""
        return _read(self.outcome_file, _OUTCOME)

    def write_outcome(self, code: int, failure: str | None, generation: int) -> None:
        """Store how the job has ended: its master is not restarted any more."""
        ended = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        outcome = {"code": code, "failure": failure, "generation": generation, "ended": ended}
        _write(self.outcome_file, outcome)

    # Who uses it

    @property
    def runs(self) -> bool:
        """Whether the job runs: its master does, or its keeper or Ray, which restarts it."""
        if is_locked(self.shared / "master.lock"):
            return True
        record = (self.job() or {}).get("master")
        if not record or "actor" not in record:
            return bool(record and keeper_lives(record))
        from karvan.launch.engines.ray.cluster import has_actor

        return self.outcome() is None and has_actor(record["address"], record["actor"])

    @contextmanager
    def launching(self) -> Iterator[None]:
        """While a launcher starts the job: a JobRunsError if it runs, or if another one does the same."""
        make_private(self.path)
        with self._locked(self.path / "lock", within=0.0):
            self._require_end()
            yield

    def _require_end(self) -> None:
        """A RunFolderError if the job runs; a damaged description is of a job that ended with its machine."""
        try:
            if self.runs:
                raise self._runs_error()
        except DamagedRunFolderError as error:
            keepers = (self.path / "processes").glob("*")
            if is_locked(self.path / "master.lock") or any(
                keeper_lives({"folder": keeper}) for keeper in keepers
            ):
                text = f"{error} But its processes still run: stop them first, with SIGTERM to its master."
                raise RunFolderError(text) from None
            _log.warning("%s It is launched anew.", error)

    @contextmanager
    def mastering(self) -> Iterator[None]:
        """While this process is the master; a JobRunsError if there is another one."""
        with self._locked(self.shared / "master.lock", _LOCK_WITHIN):
            yield

    @contextmanager
    def _locked(self, path: Path, within: float) -> Iterator[None]:
        """Hold the lock of a file; a JobRunsError if another process still does after some seconds."""
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = clock.now() + within
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if clock.now() >= until:
                        raise self._runs_error() from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(lock)

    def _runs_error(self) -> JobRunsError:
        job, master = self.job() or {}, self.master() or {}
        where = f" (process {master['pid']})" if master else ""
        since = f" since {job['launched']}" if job else ""
        return JobRunsError(
            f"Job '{self.name}' runs already{where}{since}. Expected one run of a job of this name: "
            f"`karvan status {self.name}` shows it, `karvan stop {self.name}` stops it; or give this one "
            "another name."
        )

    # Cleaning up

    def clear(self) -> None:
        """Remove what the last run has left, except its logs."""
        shutil.rmtree(self.path / "processes", ignore_errors=True)
        self._remove_sockets()
        _remove_all_but(("logs", "lock"), self.path)

    def remove_files_of_the_run(self) -> None:
        """The job has ended: remove all but its description, its outcome and its logs."""
        self._remove_sockets()
        for folder in {self.path, self.shared}:
            _remove_all_but(_REMAIN, folder)
        for path in (self.path / "processes").glob("*"):
            if not path.name.startswith(f"{MASTER}-"):  # whose keeper lives
                shutil.rmtree(path, ignore_errors=True)

    def _remove_sockets(self) -> None:
        """Remove the temporary folder of socket files, if there is one."""
        with suppress(OSError):
            shutil.rmtree(os.readlink(self.path / _SOCKETS))

    def remove_processes(self) -> None:
        """Remove the files of keepers; none of them runs any more."""
        shutil.rmtree(self.path / "processes", ignore_errors=True)

    def remove_earlier_runs(self) -> None:
        """Remove the shared folders of earlier runs, by the master that owns the checkpoints now."""
        shared = self.shared
        if shared != self.path:
            for path in shared.parent.glob(f"{_RUN}*"):
                if path != shared:
                    shutil.rmtree(path, ignore_errors=True)


def make_shared(checkpoints: Path, launch: str) -> Path:
    """Make the shared folder of a launch of a job, for its user only."""
    folder = checkpoints.absolute() / "master" / f"{_RUN}{launch[:12]}"
    try:
        folder.mkdir(0o700, parents=True)
    except OSError as error:
        raise RunFolderError(
            f"checkpoints expects a folder that this user may write to, got {checkpoints}: {error.strerror}."
        ) from error
    return folder


def _remove_all_but(names: tuple[str, ...], folder: Path) -> None:
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.name not in names:
                with suppress(OSError):
                    path.unlink()


def jobs_folder() -> Path:
    """The folder of all jobs of this user: KARVAN_JOBS, or the place for the state of programs."""
    if folder := JobEnvironment.read().jobs:
        return Path(folder).absolute()
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:
        raise RunFolderError(
            f"Jobs expect a folder for their state, but this user has no home. Set {JOBS} to a folder."
        ) from None
    return base.absolute() / "karvan" / "jobs"


def make_private(folder: Path) -> None:
    """Make the folder of a job, which nobody else may enter, rename or replace."""
    jobs = folder.parent
    jobs.parent.mkdir(parents=True, exist_ok=True)
    for path in (jobs, folder):
        path.mkdir(0o700, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _shared_error(path, status)
    parent = jobs.parent.stat()
    open_to_others = parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not parent.st_mode & stat.S_ISVTX
    if parent.st_uid not in (0, os.geteuid()) or open_to_others:
        raise _shared_error(jobs.parent, parent)
    folder.chmod(0o700)


def _shared_error(folder: Path, status: os.stat_result) -> RunFolderError:
    return RunFolderError(
        f"Jobs expect a folder where other users cannot rename files, got {folder} with mode "
        f"{stat.S_IMODE(status.st_mode):o} of user {status.st_uid}. Set {JOBS} to a folder of your own."
    )


def _read(path: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return read_object(path, fields)
    except DamagedFileError as error:
        raise DamagedRunFolderError(f"{error} `karvan launch` starts its job again.") from None


def _write(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(value))
