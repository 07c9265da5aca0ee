"""The job's registry: who is there, where, and when it last gave a sign of life.

A role's process has a `Membership` (`karvan.wire.membership`). It registers (role, index, address,
generation) and then says every second that it lives; a registry that does not know it, because it has been
restarted, asks it to register again. Nobody is asked: who dies stops talking, and counts as lost some seconds
later. Who leaves says so and is forgotten.

A process that takes over a role and index replaces the one before, which learns it from its next sign of life
and stays silent from then on. One that was started for an older generation of the job than the one whose
place it wants is refused.

The trainers of a job meet here as well: see `rendezvous_store.py`.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from karvan.clock import clock
from karvan.cluster.rendezvous_methods import rendezvous_methods
from karvan.cluster.rendezvous_store import RendezvousStore
from karvan.wire import Message, RefusedError, Request, Security, Server, Service, endpoints
from karvan.wire.directory import Member
from karvan.wire.registry_calls import REGISTRY_CALLS
from karvan.wire.rendezvous_calls import RENDEZVOUS_CALLS
from karvan.wire.security import reachable

_log = logging.getLogger("karvan.cluster")

# A trainer runs what its user wrote, which may keep it from giving signs of life for a while.
_SLOWER = {"trainer": 6.0}


@dataclass
class _Entry:
    process: str  # a random name, so that one that was replaced is not taken for the other
    address: str
    generation: int
    pid: int
    seen: float


class Registry(Service):
    """The registry, at a port of this machine, until `close`.

    lost_after: seconds without a sign of life after which a member counts as lost; for trainers six times as
    many.
    """

    name = "registry"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        *,
        lost_after: float = 10.0,
    ) -> None:
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._store = RendezvousStore()
        self.endpoints = endpoints(
            {**REGISTRY_CALLS, **RENDEZVOUS_CALLS},
            {
                "register": self._register,
                "beat": self._beat,
                "leave": self._leave,
                "members": self._list,
                **rendezvous_methods(self._store),
            },
        )
        self._server = Server(self, host, port, security)

    @property
    def address(self) -> str:
        """Where others find it."""
        return reachable(self._server.address)

    def close(self) -> None:
        """Take no more calls."""
        self._server.close()

    def healthy(self, role: str, index: int) -> bool | None:
        """Whether it has given a sign of life lately; None: it never came, or has left."""
        with self._lock:
            entry = self._entries.get((role, index))
            return None if entry is None else self._member(role, index, entry).healthy

    def members(self) -> list[Member]:
        """All that came and did not leave."""
        with self._lock:
            return [self._member(*key, entry) for key, entry in sorted(self._entries.items())]

    def forget(self, role: str, index: int) -> None:
        """What is known of a process that has ended; another one will take its place."""
        with self._lock:
            self._entries.pop((role, index), None)

    def begin_generation(self, generation: int) -> None:
        """Trainers are restarted: what those before have told each other is dropped."""
        self._store.begin_generation(generation)

    def _list(self, request: Request) -> Message:
        return Message({"members": [vars(each) for each in self.members()]})

    def _register(self, request: Request) -> Message:
        key, head = _key(request), request.head
        generation, process = head["generation"], head["process"]
        with self._lock:
            before = self._entries.get(key)
            if before is not None and generation < before.generation:
                raise RefusedError(
                    f"{key[0]} {key[1]} expected to be of generation {before.generation}, got {generation}: "
                    "the job has moved on without it."
                )
            self._entries[key] = _Entry(process, head["address"], generation, head["pid"], clock.now())
        if before is None or before.process != process:
            _log.info("%s %d is at %s", *key, head["address"])
        return Message({})

    def _beat(self, request: Request) -> Message:
        with self._lock:
            entry = self._entries.get(_key(request))
            known = entry is not None and entry.process == request.head["process"]
            if entry is not None and known:
                entry.seen = clock.now()
            return Message({"known": known, "replaced": bool(entry and not known)})

    def _leave(self, request: Request) -> Message:
        key = _key(request)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.process == request.head["process"]:
                del self._entries[key]
        return Message({})

    def _member(self, role: str, index: int, entry: _Entry) -> Member:
        silent = clock.silence(entry.seen)
        healthy = silent <= self._lost_after * _SLOWER.get(role, 1.0)
        return Member(role, index, entry.address, entry.generation, entry.pid, healthy, round(silent, 3))


def _key(request: Request) -> tuple[str, int]:
    return request.head["role"], request.head["index"]
