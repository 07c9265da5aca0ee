"""What all serving roles do: listen, register, answer calls until they are stopped.

`RoleSettings` come from the environment, which is how an engine tells a process what it is:

| variable | meaning | default |
|---|---|---|
| KARVAN_INDEX, KARVAN_COUNT | which of how many | 0 of 1 |
| KARVAN_HOST, KARVAN_PORT | where it listens; port 0: any | 127.0.0.1, 0 |
| KARVAN_ADVERTISE | the host by which others reach it, where that is another one | KARVAN_HOST |
| KARVAN_REGISTRY | the registry's host:port | none |
| KARVAN_THREADS | of lookups and updates | all cores |
| KARVAN_CHECKPOINTS | the folder below which a parameter server may save | none: it does not save |
| KARVAN_GENERATION | of the job | 0 |
| KARVAN_TOKEN_FILE, KARVAN_TLS_CERT, _KEY, _CA, _MUTUAL | see `karvan.wire.Security` | none |

SIGTERM and SIGINT end a role: it leaves the registry, so that nobody looks for it, and closes its port.
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

from karvan.clock import clock
from karvan.discovery.membership import Membership
from karvan.wire import Security, Server, Service, WireError
from karvan.wire.security.credentials import reachable

_log = logging.getLogger("karvan.cluster")

_REGISTRY_WITHIN = 60.0  # seconds; roles and their registry may be started in any order

# Role → "module:function", which makes its service from RoleSettings.
FACTORIES = {
    "parameter-server": "karvan.cluster.parameter_server.service:make",
    "embedding-worker": "karvan.cluster.embedding_worker.service:make",
    "loader": "karvan.cluster.loader.builtin:make",
}


@dataclass(frozen=True)
class RoleSettings:
    """What a process of a job knows about itself."""

    role: str
    index: int = 0
    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    registry: str = ""
    threads: int = 0
    generation: int = 0
    checkpoints: str = ""
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(
                f"{self.role} expects an index below its count, got index {self.index} of {self.count}."
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"{self.role} expects a port from 0 to 65535, got {self.port}.")
        if self.threads < 0 or self.generation < 0:
            raise ValueError(
                f"{self.role} expects threads and a generation of 0 or more, "
                f"got {self.threads} and {self.generation}."
            )

    @property
    def name(self) -> str:
        """Such as "parameter-server 0"."""
        return f"{self.role} {self.index}"

    @classmethod
    def from_environment(cls, role: str, environment: Mapping[str, str] | None = None) -> RoleSettings:
        """As the variables above say; what is wrong names the variable."""
        given = os.environ if environment is None else environment

        def number(name: str, default: int) -> int:
            text = given.get(name, "").strip()
            try:
                return int(text) if text else default
            except ValueError:
                raise ValueError(f"{name} expects a whole number, got {text!r}.") from None

        return cls(
            role=role,
            index=number("KARVAN_INDEX", 0),
            count=number("KARVAN_COUNT", 1),
            host=given.get("KARVAN_HOST", "").strip() or "127.0.0.1",
            port=number("KARVAN_PORT", 0),
            advertise=given.get("KARVAN_ADVERTISE", "").strip(),
            registry=given.get("KARVAN_REGISTRY", "").strip(),
            threads=number("KARVAN_THREADS", 0),
            generation=number("KARVAN_GENERATION", 0),
            checkpoints=given.get("KARVAN_CHECKPOINTS", ""),
            security=Security.from_environment(given),
        )


def factory_of(role: str) -> Callable[[RoleSettings], Service]:
    """What makes the service of a role; a ValueError lists the roles there are."""
    if role not in FACTORIES:
        raise ValueError(f"Expected a role of {', '.join(FACTORIES)}, got {role!r}.")
    module, _, function = FACTORIES[role].partition(":")
    made: Callable[[RoleSettings], Service] = getattr(importlib.import_module(module), function)
    return made


def serve(make: Callable[[RoleSettings], Service], settings: RoleSettings) -> None:
    """Serve until SIGTERM or SIGINT; what keeps it from beginning is raised.

    Signals are this function's while it runs, so it belongs on a process's main thread.
    """
    ended = threading.Event()
    before = {each: signal.signal(each, lambda *_: ended.set()) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        if settings.threads:
            from karvan.threads import set_num_threads

            set_num_threads(settings.threads)
        service = make(settings)
        with listening(service, settings, ended):
            while not ended.wait(1.0):  # without a limit, signals would wait as well on some systems
                pass
            _log.info("%s ends", settings.name)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def listening(
    service: Service, settings: RoleSettings, ended: threading.Event
) -> Iterator[Membership | None]:
    """Answer calls, and be in the registry, while inside; after `ended` a registry is not waited for."""
    try:
        with Server(service, settings.host, settings.port, settings.security) as server:
            address = reachable(server.address, settings.advertise)
            membership = _join(settings, address, ended) if settings.registry else None
            try:
                _log.info("%s of %d at %s", settings.name, settings.count, address)
                yield membership
            finally:
                if membership is not None:
                    membership.leave()
    finally:
        service.close()


def end(code: int) -> None:
    """End the process at once, whatever streams are still open."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(settings: RoleSettings, address: str, ended: threading.Event) -> Membership | None:
    """Register; a registry that is not there yet is waited for, but not after a signal."""
    due = clock.now() + _REGISTRY_WITHIN
    while not ended.is_set():
        try:
            return Membership(
                settings.registry,
                settings.role,
                settings.index,
                address,
                settings.security,
                settings.generation,
                patience=1.0,
            )
        except WireError:
            if clock.now() > due:
                raise
    return None
