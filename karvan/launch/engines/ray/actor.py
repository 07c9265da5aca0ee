"""`RoleActor`: owns the process of a role, on a node of a Ray cluster.

The actor starts the process with the local engine of its node, in a temporary folder. The process's keeper
ends it, with all that it has started, as soon as the actor's worker process dies, and removes the folder
(`actor_folder.py`). A master talks to the actor:

    describe     where the actor is; the answer says that there was room for it
    start        run a process; repeated by a master that adopts the actor, which has one, or none yet
    take         a batch of the process's lines; waits until there are some, and ends with its exit code
    request      stop, interrupt, kill, dump_stacks, suspend or resume

A master that adopts the actor may be on another machine than the last one. The actor then leaves its address
in the *master address file* of the process, which finds the master there (`karvan/job/address.py`).

**The master dies**: nobody takes lines any more. After `unattended` seconds the actor kills the process and
ends, with its placement group, so that nothing is left of a job whose master does not come back; until then
another master can adopt it. **The actor dies**, or its node: calls in flight fail at the master, which counts
the process as killed.

Methods run in threads: `take` waits in some, `request` in one, so that requests keep their order.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_current_placement_group, remove_placement_group

from karvan.clock import clock
from karvan.launch.engines.local import LocalEngine
from karvan.launch.engines.ray.actor_folder import make_folder, remove_abandoned
from karvan.launch.engines.ray.output_buffer import Batch, OutputBuffer

if TYPE_CHECKING:
    from karvan.launch.engines.base import Process
    from karvan.launch.engines.local import LocalHandle
    from karvan.launch.engines.ray.order import Order

Prepare = Callable[["Process", str, Path], "Process"]

TAKE_SECONDS = 10.0  # that a call of `take` waits at most
GROUPS = {"output": 4, "control": 1}  # threads
# Ray would kill the keeper first, which could then not end what the process has started.
SETTINGS = {"RAY_kill_child_processes_on_worker_exit": "false"}
SUSPENDED_AT_MOST = 3600.0  # seconds without a master, of a process that a master has suspended


@dataclass(frozen=True)
class Location:
    """Where an actor is."""

    node: str  # Ray's id
    address: str


@dataclass(frozen=True)
class Started:
    """A process that was started, or why it was not."""

    pid: int | None
    refusal: str = ""


class RoleActor:
    """Runs one process."""

    def __init__(self, unattended: float) -> None:
        self._unattended = unattended
        self._lock = threading.Lock()
        self._output = OutputBuffer()
        self._handle: LocalHandle | None = None
        self._suspended = False
        self._takers = 0
        self._attended = clock.now()
        self._group = get_current_placement_group()
        threading.Thread(target=self._end_unattended, name="unattended", daemon=True).start()

    def describe(self) -> Location:
        """Where it is."""
        self._attended = clock.now()
        return location()

    def start(self, order: Order) -> Started:
        """Start a process, unless one was started before, which then learns where the master is now."""
        self._attended = clock.now()
        with self._lock:
            if self._handle is None:
                if refusal := order.refusal(location().address):
                    return Started(None, refusal)
                self._handle = run(order, self._output)
            else:
                self._handle.tell_master(order.process)
            return Started(self._handle.pid)

    def take(self, first: int, buffer: str = "") -> Batch:
        """Lines of the process from number `first` of a buffer on."""
        with self._lock:
            self._takers += 1
        try:
            return self._output.take(first, TAKE_SECONDS, buffer)
        finally:
            with self._lock:
                self._takers -= 1
            self._attended = clock.now()

    def request(self, name: str) -> None:
        """One of the methods of a handle."""
        if name in ("suspend", "resume"):
            self._suspended = name == "suspend"
        if self._handle is not None:
            getattr(self._handle, name)()

    def unattended(self) -> float:
        """Seconds since a master has taken lines; 0 if one waits for some."""
        with self._lock:
            return 0.0 if self._takers else clock.now() - self._attended

    def _end_unattended(self) -> None:
        wake = threading.Event()
        while True:
            wake.wait(min(self._unattended / 4, 1.0))
            if self.unattended() > (SUSPENDED_AT_MOST if self._suspended else self._unattended):
                break
        with self._lock:
            if self._handle is not None:
                self._handle.kill()
                self._output.wait_for_end(TAKE_SECONDS)  # its files are removed then
        if self._group is not None:  # nobody else will remove it
            with suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)
        os._exit(1)


def location() -> Location:
    """Where this process runs."""
    return Location(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def run(
    order: Order,
    output: OutputBuffer,
    prepare: Prepare = lambda process, folder, files: process,
    **settings: Any,
) -> LocalHandle:
    """Start a process on this node; its lines and its exit code go to the buffer.

    prepare: makes the process what it is to be here, from the folder in which it runs and the folder of its
    temporary files. settings: of the local engine.
    """
    process, folder = order.on_node(location().address)
    os.chdir(folder)
    if order.own_threads:
        os.environ.pop("OMP_NUM_THREADS", None)  # of Ray: the number of CPUs that the actor has
    for name in SETTINGS:
        os.environ.pop(name, None)
    with suppress(PermissionError):  # Ray's workers give way to others
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    remove_abandoned()
    files = make_folder()
    settings = {"away": 0.0, "temporary": True, **settings}
    engine = LocalEngine(lambda name, line: output.append(line), files, **settings)

    def ended(process: Process, code: int) -> None:
        shutil.rmtree(files, ignore_errors=True)
        output.end(code)

    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # Ray blocks it in its processes
    try:
        return engine.start(prepare(process, folder, files), ended)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
