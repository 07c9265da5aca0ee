"""`RayEngine`: processes on the nodes of a Ray cluster, each owned by an actor (`actor.py`).

Actors outlive the process that has created them, so that another master can adopt them by their names; they
end by themselves if none does. Only orders, requests and lines of output travel through Ray: roles talk to
each other directly.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray import exceptions
from typing_extensions import override

from karvan.clock import clock
from karvan.errors import USAGE
from karvan.job.environment import variable
from karvan.job.roles import Role, all_roles
from karvan.launch.engines.base import Ended, Handle, Needs, Process
from karvan.launch.engines.keeper import LOG_BYTES, RoleLog
from karvan.launch.engines.local import log_of
from karvan.launch.engines.ray.actor import (
    GROUPS,
    SETTINGS,
    TAKE_SECONDS,
    Location,
    LogLines,
    Order,
    RoleActor,
    Started,
)
from karvan.launch.engines.ray.cluster import NAMESPACE, RayCluster, this_machine
from karvan.launch.engines.ray.placement import NodePlacement, PlacementGroups, living_nodes

# `RayHandle`: a process that an actor owns, with a thread that follows it.
#
# The thread waits until there is room for the actor, has it start the process, writes the lines that it takes
# from it, and reports the end. If the actor or its node dies, calls in flight fail, and the process counts as
# killed. A node that does not answer is given up after a while, so that a job does not wait for ever.

_log = logging.getLogger("karvan.launch")

_KILLED = -int(signal.SIGKILL)
_CANCEL = {"stop": int(signal.SIGTERM), "kill": int(signal.SIGKILL)}  # what has not started never does
_SAY_AFTER, _SAY_EVERY = 30.0, 60.0  # seconds; where there is room, Ray needs some to start
_ANSWER_WITHIN = 30.0  # seconds that an actor may be unavailable, besides the time that a call takes
_RESTARTED_WITHIN = 300.0  # the same where Ray restarts actors: it notices the death of a node after a while
_KILLED_WITHIN = 10.0  # seconds
_MOST_ACTORS = 20  # whose nodes die before they run, until a process counts as killed
_WAIT = 0.5
_PID_WITHIN = 5.0  # seconds after its start, in which `pid` waits for it


class _ClosedError(Exception):
    """The connection to the cluster was closed."""


class RayHandle(Handle):
    """A process on some node; `find` returns its actor, in the thread that follows it."""

    def __init__(
        self, engine: RayEngine, process: Process, name: str, find: Callable[[], Any], ended: Ended
    ) -> None:
        super().__init__(process, ended)
        self._engine = engine
        self._name = name
        self._find = find
        self._actor: Any = None
        self._requests: list[str] = []  # until it has started
        self._cancelled: int | None = None  # the signal that came before it has started
        self._killed: float | None = None
        self._location: Location | None = None
        self._pid: int | None = None
        self._created = clock.now()
        engine.cluster.start(threading.Thread(target=self._run, name=f"{process.name} on Ray", daemon=True))

    @property
    def pid(self) -> int | None:
        """Its process id on its node; None while it waits for room."""
        self._started.wait(max(self._created + _PID_WITHIN - clock.now(), 0.0))
        return self._pid

    @property
    def record(self) -> dict[str, Any]:
        """The name of its actor; for commands that look for a master, the address of the cluster as well."""
        record = {"engine": "ray", "actor": self._name}
        return {**record, "address": cluster_address()} if self._engine.lasting else record

    @property
    def node(self) -> str | None:
        """Ray's id of its node; None while it waits for room."""
        return None if self._location is None else self._location.node

    @override
    def ask(self, request: str) -> None:
        if request == "kill":
            self._killed = clock.now()
        with self._lock:
            if self._code is not None:
                return
            if self._started.is_set():
                self._send(request)
                return
            self._cancelled = self._cancelled or _CANCEL.get(request)
            self._requests.append(request)

    def _send(self, request: str) -> None:
        if self._engine.cluster.closed.is_set():
            return
        with suppress(exceptions.RayError):  # the thread that follows the actor notices its death as well
            self._actor.request.options(concurrency_group="control").remote(request)

    # The thread that follows the process

    def _run(self) -> None:
        code = _KILLED
        try:
            self._actor = self._find()
            code = self._follow()
        except _ClosedError:
            return
        except (exceptions.RayActorError, exceptions.ActorUnschedulableError) as error:
            _log.debug("%s: %s", self._process.name, error)
            if getattr(error, "actor_init_failed", False):
                self._engine.write(self._process.name, f"error: {str(error).strip().splitlines()[-1]}")
                code = USAGE
        except Exception as error:  # of Ray; the process must not seem to run for ever
            self._engine.write(self._process.name, f"error: Ray: {str(error).strip() or repr(error)}")
            if self._engine.lasting:
                self._actor = None
        self._end(code if self._cancelled is None or self._started.is_set() else -self._cancelled)

    def _end(self, code: int) -> None:
        if self._actor is not None:
            with suppress(exceptions.RayError, ValueError):
                ray.kill(self._actor)
        self._engine.placement.forget(self._process)
        with self._lock:
            self._code = code
        self._started.set()
        self._reported.set()
        self._ended(self._process, code)

    def _follow(self) -> int:
        self._location = self._wait_for_room()
        self._engine.placement.note(self._process, self._location.node)
        started: Started = self._answer(self._engine.begin(self._actor, self._process))
        if started.refusal:
            self._engine.write(self._process.name, f"error: {started.refusal}")
            return USAGE
        self._pid = started.pid
        with self._lock:
            for request in self._requests:
                self._send(request)
            self._started.set()
        return self._write_lines()

    def _wait_for_room(self) -> Location:
        """Where the actor is, once it runs. One whose node dies before is created once more."""
        for _ in range(_MOST_ACTORS):
            try:
                return self._wait_for_actor()
            except (exceptions.RayActorError, exceptions.ActorPlacementGroupRemoved) as error:
                if self._cancelled is not None or getattr(error, "actor_init_failed", False):
                    raise
                _log.debug("%s: %s", self._process.name, error)
            threading.Event().wait(_WAIT)
            self._actor = self._find()
        return self._wait_for_actor()

    def _wait_for_actor(self) -> Location:
        ref = self._actor.describe.remote()
        due = clock.now() + _SAY_AFTER
        while not self._is_ready(ref):
            if self._cancelled is not None:
                ray.kill(self._actor)
            elif clock.now() > due:
                if self._engine.placement.may_return(self._process):
                    ray.kill(self._actor)
                    continue
                room = self._engine.placement.room_text(self._process)
                self._engine.write(self._process.name, f"Waiting for room for {self._process.name}: {room}.")
                due = clock.now() + _SAY_EVERY
        location: Location = ray.get(ref)
        return location

    def _write_lines(self) -> int:
        first, buffer = 0, ""
        unavailable: float | None = None
        while True:
            try:
                call = self._actor.take.options(concurrency_group="output").remote(first, buffer)
                batch: LogLines = self._answer(call)
            except exceptions.ActorUnavailableError:
                unavailable = unavailable or clock.now()
                if self._is_given_up(clock.now() - unavailable):
                    raise
                threading.Event().wait(0.2)
                continue
            unavailable = None
            for line in batch.lines:
                self._engine.write(self._process.name, line)
            first, buffer = batch.following, batch.buffer
            if batch.code is not None:
                return batch.code

    def _is_given_up(self, seconds: float) -> bool:
        """Whether an actor that was unavailable for so long is not coming back."""
        if self._engine.lasting:
            return seconds > _RESTARTED_WITHIN
        assert self._location is not None
        return seconds > _ANSWER_WITHIN or self._engine.placement.is_lost(self._location.node)

    def _answer(self, ref: Any) -> Any:
        """The answer of the actor. One that does not answer is killed, and so is one that does not end after
        its process was killed; both then raise an error.
        """
        due = clock.now() + TAKE_SECONDS + _ANSWER_WITHIN
        while not self._is_ready(ref):
            killed_late = self._killed is not None and clock.now() > self._killed + _KILLED_WITHIN
            if clock.now() > due or killed_late:
                raise exceptions.RayActorError(error_msg=f"{self._process.name} does not answer.")
        return ray.get(ref)

    def _is_ready(self, ref: Any) -> bool:
        """Whether there is an answer, after a short wait."""
        if self._engine.cluster.closed.is_set():
            raise _ClosedError
        return bool(ray.wait([ref], timeout=_WAIT)[0])


def with_logs(
    folder: Path, names: Iterable[str], write: Callable[[str, str], None]
) -> Callable[[str, str], None]:
    """A `write` that leaves the lines of processes in logs as well, where the local engine has them."""
    paths = {name: log_of(folder, name) for name in names}
    for path in paths.values():
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
    logs = {name: RoleLog(str(path), LOG_BYTES) for name, path in paths.items()}
    lock = threading.Lock()

    def write_both(name: str, line: str) -> None:
        with lock:
            logs[name].write(f"{line}\n".encode(errors="replace"))
        write(name, line)

    return write_both


_LEAST = 0.0001  # of a resource


@dataclass
class RayEngine:
    """Runs processes on a cluster; `write(name, line)` receives their output.

    launch: an id of this launch of the job. needs: what a process of a role needs. replicas: how many
    processes of a role the job has for all its time. network: whether roles reach each other over the
    network, which needs TLS; otherwise all of them run on this machine. own_threads: the roles whose
    processes choose their number of threads themselves. unattended: seconds after which processes without a
    master end.
    """

    write: Callable[[str, str], None]
    cluster: RayCluster
    _: KW_ONLY
    job: str
    needs: Mapping[Role, Needs]
    unattended: float
    launch: str = ""
    replicas: Mapping[Role, int] = field(default_factory=dict)
    network: bool = False
    own_threads: frozenset[Role] = field(default_factory=lambda: frozenset(all_roles()))
    lasting: ClassVar[bool] = False  # whether Ray restarts its actors, which survive errors of the connection

    def __post_init__(self) -> None:
        self._on_machine = {} if self.network else this_machine_alone()
        prefix = f"{self.job}/{self.launch}"
        self._groups = PlacementGroups(prefix, self.needs, self.replicas, self._on_machine)
        self.placement = NodePlacement(self.needs, self._groups)

    def start(self, process: Process, ended: Ended) -> RayHandle:
        """Start a process as soon as there is room for it."""
        name = self._name_of(process)
        return RayHandle(self, process, name, lambda: self._create(process, name), ended)

    def adopt(self, process: Process, record: Mapping[str, Any], ended: Ended) -> RayHandle:
        """Take over a process of an earlier master."""
        name = str(record["actor"]) if record else self._name_of(process)
        return RayHandle(self, process, name, lambda: _find(name), ended)

    def close(self) -> None:
        """The job has ended: nothing of it is left in the cluster."""
        self._groups.remove()

    def begin(self, actor: Any, process: Process) -> Any:
        """Have an actor start a process."""
        in_thread = process.role in self.own_threads
        return actor.start.remote(Order.of(process, network=self.network, own_threads=in_thread))

    def _name_of(self, process: Process) -> str:
        number = process.environment.get(variable("process")) or secrets.token_hex(8)
        return f"{self.job}/{process.name}/{number}"

    def _create(self, process: Process, name: str) -> Any:
        needs = self.placement.needs[process.role]
        return self._actor(
            RoleActor,
            name,
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            memory=needs.memory or None,
            resources={**needs.resources, **self._on_machine},
            scheduling_strategy=self.placement.strategy(process),
        ).remote(self.unattended)

    def _actor(self, kind: type, name: str, **options: Any) -> Any:
        """What creates an actor that outlives this process."""
        return ray.remote(concurrency_groups=GROUPS)(kind).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            runtime_env={"env_vars": SETTINGS},
            **options,
        )


def this_machine_alone() -> dict[str, float]:
    """What of Ray's resources only the nodes on this machine have."""
    host = this_machine()
    lives = any(node["NodeManagerAddress"] == host for node in living_nodes())
    return {f"node:{host}": _LEAST} if lives else {}


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError as error:  # it has ended, and nobody knows how
        raise exceptions.RayActorError(error_msg=str(error)) from error


def cluster_address() -> str:
    """The address of the cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)
