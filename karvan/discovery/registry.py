"""The registry of a job: its processes, their addresses and heartbeats.

A role's process has a `Membership` (`karvan.discovery.membership`). It registers (role, index, address,
generation) and then sends a heartbeat every second; a registry that does not know it, because the registry
has been restarted, asks it to register again. The registry never calls members: one that dies stops sending,
and counts as lost some seconds later. One that leaves says so and is removed. A heartbeat also carries what
the process is doing (`karvan.activity`), so that the launcher finds processes that run but make no progress.

A process that registers with the role and index of another replaces it; the other learns that from its next
heartbeat and sends no more. A process of an older generation of the job cannot replace one of a newer.

The number of members is bounded: a role has as many as the job's replicas, and every part of a registration
has a limit, so that the list of members stays small.

The registry also holds the generation of the job. Only its own process can change it (`begin_generation`, by
the launcher); members and services ask for it, and a member of a generation that has not started is refused.

It also serves the rendezvous of the job's trainers: see `rendezvous.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from karvan.activity import ActivityReport
from karvan.clock import clock
from karvan.discovery.directory import Member
from karvan.discovery.rendezvous import RendezvousStore, rendezvous_endpoints
from karvan.job.address import reachable
from karvan.job.roles import Role, all_roles, role_of
from karvan.protocol import values as protocol
from karvan.protocol.master import RENDEZVOUS_CALLS
from karvan.wire import Endpoint, Message, RefusedError, Request, Security, Server, Service, endpoints

_log = logging.getLogger("karvan.cluster")

_MOST_REPLICAS = 1024  # of a role, if the number of the job's replicas is not known


@dataclass
class _Entry:
    process: str  # a random name, which distinguishes a process from the one that it replaced
    address: str
    generation: int
    pid: int
    seen: float
    count: int = 0  # of the processes of its role, as it says; 0 if it does not
    activity: ActivityReport | None = None  # of the last heartbeat


class Registry(Service):
    """The registry, at a port of this machine, until `close`.

    replicas: how many processes each role of the job has; without it, up to 1,024 of each role may register.
    lost_after: seconds without a heartbeat after which a member counts as lost, times its role's patience.
    beside: services whose calls are answered at the same address. generation: of a job that continues.
    rendezvous: a file for the keys of trainers, which then survive a restart of the registry.
    """

    name = "registry"
    progresses = False  # the process that runs it has other work

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        *,
        replicas: Mapping[Role, int] | None = None,
        lost_after: float = 10.0,
        beside: Sequence[Service] = (),
        generation: int = 0,
        rendezvous: Path | None = None,
    ) -> None:
        self._replicas = dict.fromkeys(all_roles(), _MOST_REPLICAS) if replicas is None else dict(replicas)
        self._generation = generation
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._entries: dict[tuple[Role, int], _Entry] = {}
        self._store = RendezvousStore(path=rendezvous)
        if self._store.generation != generation:
            self._store.begin_generation(generation)
        self.endpoints = endpoints(
            {**protocol.REGISTRY_CALLS, **RENDEZVOUS_CALLS},
            Endpoint(protocol.REGISTER, self._register),
            Endpoint(protocol.BEAT, self._beat),
            Endpoint(protocol.LEAVE, self._leave),
            Endpoint(protocol.MEMBERS, self._list),
            Endpoint(
                protocol.GENERATION_OF_JOB,
                lambda request: Message(protocol.Generation(generation=self._generation)),
            ),
            *rendezvous_endpoints(self._store),
        )
        for service in beside:
            if same := set(self.endpoints).intersection(service.endpoints):
                raise ValueError(f"{service.name} has calls of the registry: {', '.join(sorted(same))}.")
            self.endpoints = {**self.endpoints, **service.endpoints}
        self._server = Server(self, host, port, security)

    @property
    def address(self) -> str:
        """The address for other machines."""
        return reachable(self._server.address)

    def close(self) -> None:
        """Accept no more calls."""
        self._server.close()
        self._store.close()

    def healthy(self, role: Role, index: int) -> bool | None:
        """Whether its last heartbeat is recent; None: it has not registered, or has left."""
        with self._lock:
            entry = self._entries.get((role, index))
            return None if entry is None else self._member(role, index, entry).healthy

    def members(self) -> list[Member]:
        """All that have registered and not left."""
        with self._lock:
            return [self._member(*key, entry) for key, entry in sorted(self._entries.items())]

    def activities(self) -> dict[tuple[Role, int], ActivityReport]:
        """The activity in each member's last heartbeat, by role and index."""
        with self._lock:
            return {key: entry.activity for key, entry in self._entries.items() if entry.activity is not None}

    def forget(self, role: Role, index: int) -> None:
        """Remove a process that has ended; another one will replace it."""
        with self._lock:
            self._entries.pop((role, index), None)

    def begin_generation(self, generation: int) -> None:
        """Start this generation of the job: called in the registry's process, before its trainers start.

        The rendezvous keys of earlier generations are dropped.
        """
        with self._lock:
            if generation < self._generation:
                raise ValueError(f"Expected generation {self._generation} or a later one, got {generation}.")
            self._generation = generation
        self._store.begin_generation(generation)

    def _list(self, request: Request) -> Message:
        return Message({"members": [vars(member) for member in self.members()]})

    def _register(self, request: Request[protocol.MemberFields]) -> Message:
        head, key = request.head, _key(request.head)
        generation, process = head.generation, head.process
        self._check_bounds(key, head.address)
        with self._lock:
            if generation > self._generation:
                raise RefusedError(
                    f"{key[0]} {key[1]} expected to be of generation {self._generation} or an older one, "
                    f"got {generation}: the launcher has not started it."
                )
            before = self._entries.get(key)
            if before is not None and generation < before.generation:
                raise RefusedError(
                    f"{key[0]} {key[1]} expected to be of generation {before.generation}, got {generation}: "
                    "the job has continued without it."
                )
            self._entries[key] = _Entry(process, head.address, generation, head.pid, clock.now(), head.count)
        if before is None or before.process != process:
            _log.info("%s %d is at %s", *key, head.address)
        return Message({})

    def _check_bounds(self, key: tuple[Role, int], address: str) -> None:
        role, index = key
        count = self._replicas.get(role, 0)
        if index >= count:
            expected = f"{role} from 0 to {count - 1}" if count else f"no {role}"
            raise RefusedError(f"expected {expected}, got {index}: the job has no more replicas.")
        if not address.isprintable() or " " in address:
            raise RefusedError(f"expected an address without spaces, got {address!r}.")

    def _beat(self, request: Request[protocol.Beat]) -> Message[protocol.BeatAnswer]:
        with self._lock:
            entry = self._entries.get(_key(request.head))
            is_current = entry is not None and entry.process == request.head.process
            if entry is not None and is_current:
                entry.seen = clock.now()
                entry.activity = ActivityReport(**request.head.activity)
            return Message(protocol.BeatAnswer(known=is_current, replaced=bool(entry and not is_current)))

    def _leave(self, request: Request[protocol.MemberFields]) -> Message:
        key = _key(request.head)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.process == request.head.process:
                del self._entries[key]
        return Message({})

    def _member(self, role: Role, index: int, entry: _Entry) -> Member:
        silent = clock.silence(entry.seen)
        healthy = silent <= self._lost_after * role.patience
        return Member(
            role, index, entry.address, entry.generation, entry.pid, healthy, round(silent, 3), entry.count
        )


def _key(head: protocol.MemberFields) -> tuple[Role, int]:
    return role_of(head.role), head.index
