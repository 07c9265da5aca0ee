"""`RayHandle`: a process that an actor owns, with a thread that follows it.

The thread waits until there is room for the actor, has it start the process, writes the lines that it takes
from it, and reports the end. If the actor or its node dies, calls in flight fail, and the process counts as
killed. A node that does not answer is given up after a while, so that a job does not wait for ever.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray import exceptions

from karvan.clock import clock
from karvan.errors import USAGE
from karvan.launch.engines.base import Process
from karvan.launch.engines.ray.actor import TAKE_SECONDS, Location, LogLines, Started
from karvan.launch.engines.ray.cluster import RayCluster
from karvan.launch.engines.ray.placement import NodePlacement

_log = logging.getLogger("karvan.launch")

_KILLED = -int(signal.SIGKILL)
_SAY_AFTER, _SAY_EVERY = 30.0, 60.0  # seconds; where there is room, Ray needs some to start
_ANSWER_WITHIN = 30.0  # seconds that an actor may be unavailable, besides the time that a call takes
_KILLED_WITHIN = 10.0  # seconds
_MOST_ACTORS = 20  # whose nodes die before they run, until a process counts as killed
_WAIT = 0.5
_PID_WITHIN = 5.0  # seconds after its start, in which `pid` waits for it


class _ClosedError(Exception):
    """The connection to the cluster was closed."""


class _Engine(Protocol):
    """What a handle needs of its engine."""

    placement: NodePlacement
    cluster: RayCluster

    def write(self, name: str, line: str) -> None:
        """Write a line of a process."""

    def begin(self, actor: Any, process: Process) -> Any:
        """Have an actor start a process; the reference of its answer, a `Started`."""


class RayHandle:
    """A process on some node; `find` returns its actor, in the thread that follows it."""

    survives_errors = False  # whether the actor is left alone if the connection to Ray fails

    def __init__(
        self,
        engine: _Engine,
        process: Process,
        name: str,
        find: Callable[[], Any],
        ended: Callable[[Process, int], None],
    ) -> None:
        self._engine = engine
        self._process = process
        self._name = name
        self._find = find
        self._ended = ended
        self._lock = threading.Lock()
        self._actor: Any = None
        self._requests: list[str] = []  # until it has started
        self._cancelled: int | None = None  # the signal that came before it has started
        self._killed: float | None = None
        self._location: Location | None = None
        self._pid: int | None = None
        self._code: int | None = None
        self._created = clock.now()
        self._started = threading.Event()
        self._reported = threading.Event()
        engine.cluster.start(threading.Thread(target=self._run, name=f"{process.name} on Ray", daemon=True))

    @property
    def pid(self) -> int | None:
        """Its process id on its node; None while it waits for room."""
        self._started.wait(max(self._created + _PID_WITHIN - clock.now(), 0.0))
        return self._pid

    @property
    def record(self) -> dict[str, Any]:
        """The name of its actor."""
        return {"engine": "ray", "actor": self._name}

    @property
    def node(self) -> str | None:
        """Ray's id of its node; None while it waits for room."""
        return None if self._location is None else self._location.node

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended and its output was read."""
        self._reported.wait(timeout)
        return self._code

    def stop(self) -> None:
        """SIGTERM to the process alone; one that waits for room does not start any more."""
        self._ask("stop", cancels=signal.SIGTERM)

    def interrupt(self) -> None:
        """SIGINT to the process alone."""
        self._ask("interrupt")

    def kill(self) -> None:
        """SIGKILL to the process and all that it has started."""
        self._killed = clock.now()
        self._ask("kill", cancels=signal.SIGKILL)

    def dump_stacks(self) -> None:
        """SIGQUIT to the process alone."""
        self._ask("dump_stacks")

    def suspend(self) -> None:
        """SIGSTOP to the process and all that it has started."""
        self._ask("suspend")

    def resume(self) -> None:
        """SIGCONT to them."""
        self._ask("resume")

    def _ask(self, request: str, cancels: signal.Signals | None = None) -> None:
        with self._lock:
            if self._code is not None:
                return
            if self._started.is_set():
                self._send(request)
                return
            if cancels is not None:
                self._cancelled = self._cancelled or int(cancels)
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
            if self.survives_errors:
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
