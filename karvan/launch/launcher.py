"""The launcher of a job: starts its master, shows its log, passes signals on, and reports how it has ended.

The launcher hosts nothing. **It dies** (kill -9): the master's keeper has the master stop the job in order,
so that trainers save, unless the job is detached. **The master dies**: its keeper restarts it. **The keeper
dies**, and the master with it: the launcher starts both again, and the new master adopts the processes of the
job.

With a running Ray cluster, the master is not a process of this machine but a detached actor, which Ray
restarts on any node (`engines/ray/master.py`).
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from karvan.clock import clock
from karvan.errors import FAILED, TEMPORARY, USAGE
from karvan.job.address import unix_host
from karvan.job.checkpoint_url import url_of
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.launch.engines.base import Engine, Handle, Process, end_text, name_of
from karvan.launch.engines.choice import make_master_engine
from karvan.launch.health import Timing
from karvan.launch.job_spec import TLS, JobSpec
from karvan.launch.merged_logs import JOB, SEPARATOR, MergedLogs
from karvan.launch.processes import RESUMED, SUSPENDED
from karvan.launch.role_programs import Commands, module_command, open_import_folders, security_of
from karvan.launch.run_folder import MASTER, RunFolder, make_certificate, make_shared, make_token
from karvan.launch.supervisor import JobOutcome
from karvan.process_end import handling

_MOST_STARTS = 3  # of a master whose keeper was killed
_SUSPENDED_WITHIN = 2.0  # seconds; a reader of the output may be stopped already by the same Ctrl-Z
_RESUMED_WITHIN = 0.3
_POLL = 0.5


@dataclass
class Launcher:
    """Starts a job and follows it.

    detach: the job runs on without the launcher. timing: for the supervisor. engine: the name of the engine
    that runs the job's roles, with its address if it has one.
    """

    spec: JobSpec
    commands: Commands
    timing: Timing | None = None
    detach: bool = False
    engine: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        self._folder = RunFolder.of_job(self.spec.name)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._state: dict[str, Any] = {}  # what the master has said last
        self._code: int | None = None  # of the master's process
        self._handle: Handle | None = None
        self._suspended = False
        self._show_lock = threading.Lock()
        self._shows = True  # the lines of the job, until it is left alone

    def run(self) -> JobOutcome | None:
        """Run the job to its end, or until it runs if it is detached: then None."""
        names = [
            name_of(role, index)
            for role in self.commands
            for index in range(self.spec.of_role(role).replicas)
        ]
        self._logs = MergedLogs(names)
        with ExitStack() as stack:
            stack.enter_context(self._signals())
            master_engine = make_master_engine(
                *(self.engine, self._show, self.spec, self._folder),
                address=self.address,
                detach=self.detach,
            )
            try:
                engine = stack.enter_context(master_engine)
            except ConnectionError as error:
                return JobOutcome(TEMPORARY, str(error))
            except ValueError as error:
                return JobOutcome(USAGE, str(error))
            with self._folder.launching():
                try:
                    self._prepare()
                    self._start(engine)
                except BaseException:
                    self._folder.remove_files_of_the_run()
                    raise
            for _ in range(_MOST_STARTS):
                if self._follow():
                    return None
                outcome = self._outcome()
                if outcome is not None or self._code != -signal.SIGKILL:
                    break
                self._logs.say("The keeper of the master was killed; both are started again.")
                self._start(engine)
        if self._on_cluster and outcome is not None:  # the master has no access to the run folder
            self._folder.remove_files_of_the_run()
        self._folder.remove_processes()
        if outcome is None and not self._folder.runs:  # the master could not remove the token and the key
            self._folder.remove_files_of_the_run()
        return outcome or JobOutcome(FAILED, self._lost())

    # Starting

    def _prepare(self) -> None:
        """Leave everything in the run folder that the master needs."""
        folder, spec = self._folder, self.spec
        folder.clear()
        for place in open_import_folders(spec):
            self._logs.say(
                f"WARNING: programs of the job import modules from {place}, where every user may write: "
                "their modules would run as you. Move the program, or remove the folder from PYTHONPATH."
            )
        if spec.token_file is None:
            make_token(folder.token)
        absolute: dict[str, Any] = {"token_file": (spec.token_file or folder.token).absolute()}
        host = spec.host
        if spec.stays_here and self.engine == "local":
            host = unix_host(folder.make_sockets() / f"{MASTER}.sock")
        elif spec.tls is None:
            absolute["tls"] = TLS(**make_certificate(folder.path))
        launch = secrets.token_hex(16)
        shared: Path | None = None
        if self._on_cluster:  # the master may run in another folder
            for name in ("checkpoints", "logs"):
                if (path := getattr(spec, name)) is not None:
                    absolute[name] = path.absolute()
            shared = folder.path
            if spec.checkpoints is not None and url_of(spec.checkpoints) is None:
                shared = make_shared(spec.checkpoints, launch)
        if spec.tls is not None:  # for commands that run elsewhere
            files = {name: path.absolute() for name, path in vars(spec.tls).items() if isinstance(path, Path)}
            absolute["tls"] = spec.tls.model_copy(update=files)
        self._job: dict[str, Any] = {
            "spec": spec.model_copy(update=absolute).model_dump(mode="json"),
            "commands": self.commands,
            "host": host,
            "timing": asdict(self.timing or Timing()),
            "engine": self.engine,
            "address": self.address,
            "owner": launch,
            "shared": None if shared is None else str(shared),
            "detached": self.detach,
            "launched": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            "folder": os.getcwd(),
        }
        folder.write_job(self._job)

    def _start(self, engine: Engine) -> None:
        token = secrets.token_hex(8)
        checkpoints = self.spec.checkpoints
        environment = JobEnvironment(
            job=self.spec.name,
            role=Role.MASTER,
            process=token,
            checkpoints="" if checkpoints is None else url_of(checkpoints) or str(checkpoints),
        ).variables()
        command = module_command("karvan.launch.master")
        if self._on_cluster:
            job = JobSpec.model_validate(self._job["spec"])
            environment |= security_of(job)
        else:
            command = (*command, str(self._folder.path))
        self._code = None
        process = Process(Role.MASTER, 0, command, environment)
        self._handle = engine.start(process, self._ended)
        self._folder.write_job({**self._job, "master": self._handle.record})

    @property
    def _on_cluster(self) -> bool:
        """Whether the master is an actor of a cluster, and not a process of this machine."""
        return self.engine == "ray" and self.address is not None

    # Following

    def _show(self, process: str, line: str) -> None:
        name, separator, text = line.partition(SEPARATOR)
        if not separator or " " in name:  # an error of Python itself
            name, text = process, line
        if name == JOB:
            state = json.loads(text)
            self._events.put(lambda: self._state.update(state))
            return
        with self._show_lock:
            if self._shows:
                self._logs.write(name, text)
        if text in (SUSPENDED, RESUMED):
            self._suspended = text == SUSPENDED

    def _ended(self, process: Process, code: int) -> None:
        def note() -> None:
            self._code = code

        self._events.put(note)

    def _follow(self) -> bool:
        """Wait until the master has ended; whether the job runs, and is to be left alone."""
        while self._code is None:
            try:
                self._events.get(timeout=_POLL)()
            except queue.Empty:
                continue
            if self.detach and self._state.get("state") == "running":
                with self._show_lock:  # no line comes after what the command says last
                    self._shows = False
                return True
        return False

    def _outcome(self) -> JobOutcome | None:
        outcome = self._state if "code" in self._state else self._folder.outcome()
        return None if outcome is None else JobOutcome(outcome["code"], outcome["failure"])

    def _lost(self) -> str:
        assert self._code is not None
        reason = self._logs.reason(MASTER)
        text = f"The master of job {self.spec.name} {end_text(self._code)}, and could not be restarted."
        return "\n".join([f"{text} Its last lines:", *reason.lines]) if reason else text

    # Signals

    def _signals(self) -> AbstractContextManager[None]:
        # A terminal that is closed stops the job like SIGTERM, unless nohup says otherwise.
        asked: dict[int, Callable[[], None]] = {
            signal.SIGINT: lambda: self._master().interrupt(),
            signal.SIGTERM: lambda: self._master().stop(),
            signal.SIGHUP: lambda: self._master().stop(),
            signal.SIGTSTP: self._suspend,
        }
        for ignorable in (signal.SIGHUP, signal.SIGTSTP):
            if signal.getsignal(ignorable) == signal.SIG_IGN:
                del asked[ignorable]
        return handling(dict.fromkeys(asked, lambda got, frame: self._events.put(asked[got])))

    def _master(self) -> Handle:
        assert self._handle is not None
        return self._handle

    def _suspend(self) -> None:
        """Stop the job, then this process, so that the shell gets its terminal back."""
        continued = threading.Event()  # perhaps before it is stopped
        with handling({signal.SIGCONT: lambda got, frame: continued.set()}):
            self._master().suspend()
            self._wait_until(lambda: self._suspended, _SUSPENDED_WITHIN)
            if not continued.is_set():
                os.kill(os.getpid(), signal.SIGSTOP)
        until = clock.now() + _SUSPENDED_WITHIN
        while self._suspended and clock.now() < until:  # a master that was not stopped yet needs it once more
            self._master().resume()
            self._wait_until(lambda: not self._suspended, _RESUMED_WITHIN)
        self._master().resume()

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        until = clock.now() + seconds
        while not condition() and clock.now() < until and self._master().poll() is None:
            clock.sleep(0.01)
