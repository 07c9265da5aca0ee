"""The master's process: `python -P -m karvan.launch.master RUN_FOLDER`.

It serves the registry, the leased work and the calls about the job at one address, and supervises the job's
processes. All that it must not lose is in files: the supervisor's state, the trainers' rendezvous keys, and
the ledger of work, which is in the folder of checkpoints if the job has one. Its keeper restarts a master
that dies. The next one listens at the same address, takes over the lease of the folder of checkpoints, and
adopts the processes. On another machine it has another address, of which its engine tells them. Two masters
exclude each other by a lock in the run folder, by that lease, and by the ledger's lock.

Its services are imported where they start: an installation that lacks a part is an outcome of the job, and no
reason to restart the master.

What it prints is the log of the job: a line of a process is `NAME | line`. Lines of the name `job` are for
programs: JSON with the state of the job, and in the end how it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from karvan.errors import DAMAGED, FAILED, TEMPORARY, USAGE, code_of, text_of
from karvan.job.address import is_everywhere, split_address
from karvan.job.checkpoint_url import shown, url_of
from karvan.job.roles import Role, role_of, start_order
from karvan.launch.engines.base import name_of
from karvan.launch.engines.choice import make_engine
from karvan.launch.health import Timing
from karvan.launch.job_spec import JobSpec
from karvan.launch.merged_logs import JOB, MergedLogs
from karvan.launch.processes import JobState
from karvan.launch.role_programs import Commands, security_of
from karvan.launch.run_folder import GROUP, RENDEZVOUS, STATE, WORK, RunFolder, RunFolderError
from karvan.launch.supervisor import JobOutcome, Supervisor
from karvan.owner import OwnerError, Ownership, own

if TYPE_CHECKING:
    from karvan.discovery.registry import Registry
    from karvan.launch.job_calls import JobService
    from karvan.work.service import WorkService
    from karvan.work.trainer_group import TrainerGroup


# The signals of a master: kept from its first moment on, for the supervisor that it has later.
#
# The keeper starts a master with these signals blocked, so none is lost while Python starts.


_STOPS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


class MasterSignals:
    """Passes SIGINT, SIGTERM, SIGHUP and SIGTSTP on, those before `pass_to` as well."""

    def __init__(self) -> None:
        self._to: Supervisor | None = None
        self._early: list[int] = []
        for number in (*_STOPS, signal.SIGTSTP):
            signal.signal(number, self._take)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*_STOPS, signal.SIGTSTP])

    def pass_to(self, supervisor: Supervisor) -> None:
        """Pass signals to this supervisor from now on."""
        self._to = supervisor
        early, self._early = self._early, []
        for number in early:
            self._pass(supervisor, number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._to is None:
            self._early.append(number)
        else:
            self._pass(self._to, number)

    def _pass(self, supervisor: Supervisor, number: int) -> None:
        if number == signal.SIGTSTP:
            supervisor.suspend()
        else:
            supervisor.interrupt(_STOPS[signal.Signals(number)])


_PORT_WITHIN = 20.0  # seconds; somebody else may use the port of a master that died, for a moment


class MasterError(RuntimeError):
    """Why a master cannot run its job; restarting it does not help."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def run(folder: RunFolder, signals: MasterSignals) -> JobOutcome:
    """Run the job of a folder to its end."""
    job = folder.job()
    if job is None:
        raise MasterError(f"{folder.path} expected to have a job.json, got none.", USAGE)
    spec = JobSpec.model_validate(job["spec"])
    commands: Commands = {role_of(role): tuple(command) for role, command in job["commands"].items()}
    names = [name_of(role, index) for role in commands for index in range(spec.of_role(role).most)]
    state = JobState.read(folder.shared / STATE)
    with ExitStack() as stack:
        logs = stack.enter_context(closing(MergedLogs(names, spec.logs)))
        stack.enter_context(logs.warnings())
        owner = stack.enter_context(_owned(spec, job["owner"]))
        folder.remove_earlier_runs()
        timing = Timing(**job["timing"])
        services = stack.enter_context(_services(folder, spec, job["host"], timing, state))
        work, group, service, registry = services
        job_engine = make_engine(
            *(job["engine"], logs.write, spec, folder), address=job["address"], launch=job["owner"]
        )
        try:
            engine = stack.enter_context(job_engine)
        except ValueError as error:
            raise MasterError(str(error), USAGE) from error
        except ConnectionError as error:
            raise MasterError(str(error), TEMPORARY) from error
        supervisor = Supervisor(
            *(spec, engine, registry, logs, commands, work, group, timing),
            owner="" if owner is None else owner.id,
            state=state,
            started=lambda: logs.announce({"state": "running"}),
        )
        service.supervise(supervisor)
        if owner is not None:
            owner.on_lost(lambda: supervisor.interrupt(signal.SIGTERM))
        signals.pass_to(supervisor)
        logs.say(f"Registry at {registry.address}, token file {spec.token_file}.")
        outcome = supervisor.run()
        if owner is not None:
            owner.check()
        return outcome


@contextmanager
def _owned(spec: JobSpec, lease: str) -> Iterator[Ownership | None]:
    """The master owns the folder of checkpoints, for all processes of the job."""
    if spec.checkpoints is None:
        yield None
        return
    place = None
    if url_of(spec.checkpoints) is not None:
        from karvan.checkpoint.files import lease_object  # imports torch

        place = lease_object(spec.checkpoints)
    owner = own(spec.checkpoints, lease, place)
    try:
        if place is not None:
            from karvan.checkpoint.atomic_folder import try_writing
            from karvan.checkpoint.errors import CheckpointError

            try:
                try_writing(spec.checkpoints)
            except CheckpointError as error:
                raise MasterError(str(error), TEMPORARY if error.temporary else DAMAGED) from error
        elif not os.access(spec.checkpoints, os.W_OK | os.X_OK) or not spec.checkpoints.is_dir():
            raise MasterError(
                f"checkpoints expects a folder that this user may write to, got {shown(spec.checkpoints)}.",
                DAMAGED,
            )
        yield owner
    finally:
        owner.release()


@contextmanager
def _services(
    folder: RunFolder, spec: JobSpec, host: str, timing: Timing, state: JobState
) -> Iterator[tuple[WorkService, TrainerGroup, JobService, Registry]]:
    """The ledger, the group of trainers, the calls about the job, and the registry, which answers all."""
    from karvan.cluster.master import LEDGER, release_all
    from karvan.launch.job_calls import JobService
    from karvan.work.ledger import LedgerDiskError, LedgerError
    from karvan.work.service import WorkService
    from karvan.work.trainer_group import TrainerGroup

    ledger = folder.shared / WORK if spec.checkpoints is None else spec.checkpoints / LEDGER
    ledger.parent.mkdir(parents=True, exist_ok=True)
    try:
        work = WorkService(ledger)
    except LedgerError as error:
        raise MasterError(str(error), USAGE) from None
    except LedgerDiskError as error:
        if folder.master() is not None:
            raise  # processes of the job run: its keeper tries again
        raise MasterError(f"{error.strerror}.", TEMPORARY) from None
    with closing(work):
        if not state.begun:
            work.forget_predictions()  # of the launch before
        group = TrainerGroup(
            folder.shared / GROUP,
            least=spec.roles.trainers.least,
            lost_after=Role.TRAINER.patience * timing.lost,
            settled=partial(release_all, work),
        )
        work.refuse(group.gone)
        service = JobService()
        with closing(_registry(folder, spec, host, timing, state, [work, group, service])) as registry:
            folder.write_master(registry.address)
            yield work, group, service, registry


def _registry(
    folder: RunFolder, spec: JobSpec, host: str, timing: Timing, state: JobState, beside: list[Any]
) -> Registry:
    from karvan.discovery.registry import Registry
    from karvan.wire import ListenError, Security

    before = folder.master()
    last, port = (host, spec.registry_port) if before is None else split_address(before["address"])
    elsewhere = not is_everywhere(host) and last != host
    until = time.monotonic() + (0.0 if before is None else _PORT_WITHIN)
    while True:
        try:
            return Registry(
                host,
                port,
                Security.from_environment(security_of(spec)),
                replicas={role: spec.of_role(role).most for role in start_order()},
                lost_after=timing.lost,
                beside=beside,
                generation=state.generation,
                rendezvous=folder.shared / RENDEZVOUS,
            )
        except ListenError as error:
            if elsewhere and port != spec.registry_port:
                port = spec.registry_port  # processes are told the address on another machine in any case
            elif time.monotonic() > until:
                raise MasterError(str(error), TEMPORARY) from error
            time.sleep(0.1)


def main(path: Path) -> int:
    """Run the job, and leave its outcome; returns its exit code."""
    signals = MasterSignals()
    folder = RunFolder(path)
    try:
        with folder.mastering():
            try:
                outcome = run(folder, signals)
            except (MasterError, OwnerError) as error:
                code = error.code if isinstance(error, MasterError) else code_of(error)
                outcome = JobOutcome(code, str(error) if isinstance(error, MasterError) else text_of(error))
            except Exception as error:
                if folder.master() is not None:
                    raise  # processes of the job may run: the next master continues with them
                traceback.print_exc()
                text = f"The master could not start: {type(error).__name__}: {error}"
                outcome = JobOutcome(code_of(error), text)
            state = JobState.read(folder.shared / STATE)
            folder.write_outcome(outcome.code, outcome.failure, state.generation)
            ended = {"state": "ended", "code": outcome.code, "failure": outcome.failure}
            print(f"{JOB} | {json.dumps(ended)}", flush=True)
            folder.remove_files_of_the_run()
    except RunFolderError as error:
        print(f"error: {error}", flush=True)
        return FAILED
    return outcome.code


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code & 0xFF)  # streams of callers may still be open
