"""What all serving roles do: listen, register, answer calls until they are stopped.

`RoleSettings` come from the environment, in which an engine describes each process (`JobEnvironment`).

SIGTERM and SIGINT end a role: it leaves the registry, so that nobody looks it up, and closes its port.

A role that gets no more memory, or cannot use its disk, ends at once: its callers have lost it as if it had
been killed, and an engine replaces it. What it was asked for is not to blame.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from karvan.clock import clock
from karvan.discovery.directory import Membership
from karvan.errors import FAILED, TEMPORARY, is_out_of_memory, plain
from karvan.job.address import MasterAddress, reachable
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role, all_roles
from karvan.process_end import handling
from karvan.protocol.values import GENERATION, GENERATION_OF_JOB, RunHello
from karvan.wire import Client, RefusedError, Security, Server, Service, WireError

_log = logging.getLogger("karvan.cluster")

_REGISTRY_WITHIN = 60.0  # seconds; roles and their registry may be started in any order


@dataclass(frozen=True)
class RoleSettings:
    """What a process of a job knows about itself."""

    role: Role
    job: JobEnvironment = field(default_factory=JobEnvironment)
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        job, threads = self.job, self.job.threads or 0
        if job.count < 1 or not 0 <= job.index < job.count:
            raise ValueError(
                f"{self.role} expects an index below its count, got index {job.index} of {job.count}."
            )
        if not 0 <= job.port < 65536:
            raise ValueError(f"{self.role} expects a port from 0 to 65535, got {job.port}.")
        if threads < 0 or job.generation < 0:
            raise ValueError(
                f"{self.role} expects threads and a generation of 0 or more, "
                f"got {threads} and {job.generation}."
            )
        if job.capacity is not None and not self.role.holds_rows:
            owners = ", ".join(role for role in all_roles() if role.holds_rows)
            raise ValueError(
                f"{self.role} has no rows: expected a capacity of {owners} only, got {job.capacity}."
            )

    @property
    def name(self) -> str:
        """Such as "parameter-server 0"."""
        return f"{self.role} {self.job.index}"

    @property
    def host(self) -> str:
        """Where it listens."""
        return self.job.host or "127.0.0.1"

    @classmethod
    def from_environment(cls, role: Role, environment: Mapping[str, str] | None = None) -> RoleSettings:
        """Read the variables; an error names the variable."""
        return cls(role, JobEnvironment.read(environment), Security.from_environment(environment))


def factory_of(name: str) -> Callable[[RoleSettings], Service]:
    """The function that makes the service of a role; a ValueError lists the roles that `karvan role` runs."""
    factories = {role.name: role.factory for role in all_roles() if role.factory}
    if name not in factories:
        run = ", ".join(role for role in all_roles() if role.factory or role.start is None)
        raise ValueError(f"Expected a role of {run}, got {name!r}.")
    module, _, function = factories[name].partition(":")
    factory: Callable[[RoleSettings], Service] = getattr(importlib.import_module(module), function)
    return factory


def serve(make: Callable[[RoleSettings], Service], settings: RoleSettings) -> None:
    """Serve until SIGTERM or SIGINT; an error that prevents the start is raised.

    Sets signal handlers while it runs, so it must be called on the process's main thread.
    """
    with stop_signals() as ended:
        if settings.job.threads:
            from karvan.threads import set_num_threads

            set_num_threads(settings.job.threads)
        service = make(settings)
        with listening(service, settings, ended):
            while not ended.wait(1.0):  # without a timeout, some systems would not deliver signals
                pass
            _log.info("%s ends", settings.name)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set while inside; only on the process's main thread."""
    ended = threading.Event()
    with handling(dict.fromkeys((signal.SIGTERM, signal.SIGINT), lambda *_: ended.set())):
        yield ended


@contextmanager
def listening(
    service: Service, settings: RoleSettings, ended: threading.Event
) -> Iterator[Membership | None]:
    """Answer calls and be registered while inside; once `ended` is set, stop waiting for a registry."""
    service.on_exhaustion = partial(_end_exhausted, settings.name)
    try:
        with Server(service, settings.host, settings.job.port, settings.security) as server:
            address = reachable(server.address, settings.job.advertise)
            membership = _join(settings, address, ended) if settings.job.registry else None
            try:
                _log.info("%s of %d at %s", settings.name, settings.job.count, address)
                yield membership
            finally:
                if membership is not None:
                    membership.leave()
    finally:
        service.close()


def end(code: int) -> None:
    """End the process at once, even if streams are still open."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_exhausted(name: str, error: BaseException) -> None:
    """Without memory, the same rows will not fit again: code 1. A disk may have room later: code 75."""
    memory = is_out_of_memory(error)
    try:
        what = "is out of memory" if memory else "cannot use its disk"
        why = getattr(error, "strerror", None) or plain(error) or type(error).__name__
        print(f"error: {name} {what}: {why}", file=sys.stderr, flush=True)
    finally:
        os._exit(FAILED if memory else TEMPORARY)


def _join(settings: RoleSettings, address: str, ended: threading.Event) -> Membership | None:
    """Register; waits for a registry that is not up yet, but not after a signal."""
    due = clock.now() + _REGISTRY_WITHIN
    while not ended.is_set():
        try:
            return Membership(
                settings.job.master,
                settings.role,
                settings.job.index,
                address,
                settings.security,
                settings.job.generation,
                count=settings.job.count,
                patience=1.0,
            )
        except WireError:
            if clock.now() > due:
                raise
    return None


# The generation of a job, as its registry confirms it.
#
# The launcher starts a generation in the registry, which lives in its process, before it starts the
# processes of that generation. A trainer names its generation when it connects to a service. One that is
# older than what the service knows is refused; for a newer one the service asks the registry, and refuses it
# if the registry has another. So a caller that makes up a generation cannot cause a service to drop its rows
# and refuse the real trainers. While the registry cannot be reached, trainers of the known generation are
# served as before; newer ones wait for it and are refused if it does not come back.
#
# A job without a registry, whose processes know each other's addresses, has no such authority: its generation
# is the one that each service was started with, until the service is restarted.


_PATIENCE = 60.0  # seconds for the registry to answer


class Generations:
    """What a service knows of its job's generation.

    registry: "host:port", or "" if there is none. requested: the generation with which the
    service was started.
    """

    def __init__(
        self,
        registry: str | MasterAddress = "",
        security: Security | None = None,
        requested: int = 0,
        *,
        patience: float = _PATIENCE,
    ) -> None:
        self._registry = registry
        self._security = security
        self._patience = patience
        self._lock = threading.Lock()
        self.newest = requested

    def check(self, value: Any) -> int:
        """The generation that a trainer names, if it is the job's; a RefusedError otherwise."""
        generation = GENERATION.check(value, "the generation")
        if not self._registry:
            if generation != self.newest:
                raise RefusedError(
                    f"expected generation {self.newest}, as when this service started, got {generation}: "
                    "a job without a registry changes its generation by restarting its services."
                )
            return generation
        if generation > self.newest:
            with self._lock:  # one call to the registry for all trainers that connect at the same time
                if generation > self.newest:
                    self.newest = max(self.newest, self._ask(generation))
        if generation != self.newest:
            raise RefusedError(f"expected generation {self.newest}, as the registry says, got {generation}.")
        return generation

    def _ask(self, generation: int) -> int:
        peer = Client("registry", self._registry, self._security, forgetful=True)
        try:
            return peer.call(GENERATION_OF_JOB, deadline=self._patience).head.generation
        except WireError as error:
            raise RefusedError(
                f"expected the registry at {self._registry} to confirm generation {generation}, got: {error}"
            ) from error
        finally:
            peer.close()


def generations_of(settings: RoleSettings) -> Generations:
    """The generations of the service of a process."""
    job = settings.job
    return Generations(job.master if job.registry else "", settings.security, job.generation)


OLDER_RUN = "expected a trainer of the job's newest run, got one of an older run."


class RunService(Service):
    """A service of trainers, of the newest run in the newest generation that it has heard of.

    The trainers of a run have agreed on its name. A run that another has followed is over, and its trainers
    are refused.
    """

    def __init__(self, generations: Generations | None) -> None:
        self._generations = generations or Generations()
        self._generation = -1
        self._run = ""
        self._past_runs: set[str] = set()  # of this generation
        self._lock = threading.Lock()

    def _enter(self, hello: RunHello) -> None:
        """A trainer says hello; if it is the first one of a generation or of a run, that begins."""
        generation = self._generations.check(hello.generation)
        with self._lock:
            if generation < self._generation:
                raise RefusedError(
                    f"expected generation {self._generation} or a newer one, got {generation}."
                )
            if generation > self._generation:
                self._begin_generation(generation)
                self._generation, self._run, self._past_runs = generation, "", set()
            if hello.run in self._past_runs:
                raise RefusedError(OLDER_RUN)
            if hello.run != self._run:
                self._begin_run(hello)
                self._past_runs.add(self._run)
                self._run = hello.run
            self._admit(hello)

    def _begin_generation(self, generation: int) -> None:
        """The job has gone back to a checkpoint; under the lock."""

    def _begin_run(self, hello: Any) -> None:
        """The trainers are others than before; under the lock."""

    def _admit(self, hello: Any) -> None:
        """A trainer of the current run has connected, for the first time or again; under the lock."""
