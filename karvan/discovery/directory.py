"""Where the processes of a job are: their addresses, and a process's own membership in the registry.

A `Client` gets a function that looks the address up, so that a role which was restarted at another address is
found again:
`Client("parameter-server 0", lambda: directory.find(Role.PARAMETER_SERVER, 0))`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from karvan.activity import activity, dump_stacks_on_signal
from karvan.clock import clock
from karvan.errors import RefusedError, WireError
from karvan.job.address import MasterAddress, split_address
from karvan.job.environment import JobEnvironment, addresses_name, variable
from karvan.job.roles import Role, role_of, start_order
from karvan.protocol.values import BEAT, LEAVE, MEMBERS, REGISTER, Beat, MemberFields
from karvan.wire.client import Client
from karvan.wire.message import Message
from karvan.wire.schema import A, Call
from karvan.wire.security import Security

_PAUSES = 0.02, 0.25  # seconds between two calls, at first and at most


@dataclass(frozen=True)
class Member:
    """A process of the job, as registered."""

    role: Role
    index: int
    address: str
    generation: int
    pid: int
    healthy: bool
    silent: float  # seconds since its last heartbeat
    count: int = 0  # of the processes of its role, as it says; 0 if it does not

    def __str__(self) -> str:
        state = "" if self.healthy else f", no heartbeat for {self.silent:.0f} s"
        return f"{self.role} {self.index} at {self.address}{state}"


class Addresses(Protocol):
    """Finds processes by role and index."""

    def find(self, role: Role, index: int, timeout: float = 60.0) -> str:
        """Its address "host:port"; a WireError if it is not found in time."""

    def close(self) -> None:
        """Release the connection to the registry, if any."""


class RegistryClient:
    """Calls the registry at "host:port", which may move; after a call without an answer it connects anew."""

    def __init__(self, registry: str | MasterAddress, security: Security | None = None) -> None:
        self._registry = registry
        self._security = security
        self._lock = threading.Lock()
        self._peer: Client | None = None

    def call(self, call: Call[Any, A], *content: Any, deadline: float) -> Message[A]:
        """The answer to a call with this head and these arrays; a WireError after so many seconds without."""
        with self._lock:
            if self._peer is None:
                self._peer = Client("registry", self._registry, self._security, forgetful=True)
            peer = self._peer
        try:
            return peer.call(call, *content, deadline=deadline)
        except WireError:
            with self._lock:
                if self._peer is peer:  # the next call needs another one
                    self._peer = None
            peer.close()
            raise

    def close(self) -> None:
        """Disconnect from the registry; calls without an answer fail."""
        with self._lock:
            peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()


class Directory(RegistryClient):
    """Asks the registry where processes are; waits for processes that are not there, or lost."""

    def find(self, role: Role, index: int, timeout: float = 60.0) -> str:
        """Its address; a WireError names it, and the members that were found."""
        role_of(role)
        due = clock.now() + timeout
        pause, last = _PAUSES
        while True:
            try:
                members = self.members(max(0.1, due - clock.now()))
            except WireError:
                if clock.now() > due:
                    raise
                continue  # a call of another thread missed its deadline, which closed the shared connection
            for member in members:
                if member.role == role and member.index == index and member.healthy:
                    return member.address
            if clock.now() + pause > due:
                where = f"at the registry {self._registry} within {timeout:.0f} s"
                names = "; ".join(map(str, members)) or "none"
                raise WireError(f"Expected {role} {index} {where}, found {names}.")
            time.sleep(pause)
            pause = min(last, 2 * pause)

    def count(self, role: Role, timeout: float = 60.0) -> int:
        """How many processes a role has, as the first of them says that registers; a WireError if none does.

        For jobs that nobody launches, whose processes are started one by one.
        """
        due = clock.now() + timeout
        pause, last = _PAUSES
        while True:
            with contextlib.suppress(WireError):  # a registry that is not up yet
                for member in self.members(max(0.1, due - clock.now())):
                    if member.role == role and member.healthy and member.count:
                        return member.count
            if clock.now() + pause > due:
                raise WireError(
                    f"Expected a {role} at the registry {self._registry} within {timeout:.0f} s, found none."
                )
            time.sleep(pause)
            pause = min(last, 2 * pause)

    def members(self, timeout: float = 10.0) -> list[Member]:
        """All members of the registry."""
        listed = self.call(MEMBERS, deadline=timeout).head.members
        return [Member(**{**vars(member), "role": role_of(member.role)}) for member in listed]


class StaticDirectory:
    """Addresses that are known in advance, by role, in the order of their indices."""

    def __init__(self, addresses: Mapping[Role, Sequence[str]]) -> None:
        for role in addresses:
            role_of(role)
        self._addresses = {role: list(where) for role, where in addresses.items()}
        for listed in self._addresses.values():
            for address in listed:
                split_address(address)

    def find(self, role: Role, index: int, timeout: float = 60.0) -> str:
        """Its address; a WireError if there is none in the list."""
        role_of(role)
        addresses = self._addresses.get(role, [])
        if index >= len(addresses):
            places = (
                "; ".join(f"{role} {index} at {where}" for index, where in enumerate(addresses)) or "none"
            )
            raise WireError(f"Expected {role} {index} in the list of addresses, found {places}.")
        return addresses[index]

    def close(self) -> None:
        """Nothing to do: there is no connection."""


def directory_from_environment(
    environment: Mapping[str, str] | None = None, security: Security | None = None
) -> Directory | StaticDirectory:
    """The registry that the environment names, or else the addresses that it lists."""
    job = JobEnvironment.read(environment)
    if job.registry:
        return Directory(job.master, Security.from_environment(environment) if security is None else security)
    if not job.addresses:
        names = ", ".join(variable(addresses_name(role)) for role in start_order() if role.listens)
        raise ValueError(f"Expected KARVAN_REGISTRY or a list of addresses in {names}, got neither.")
    return StaticDirectory(job.addresses)


def find_role(
    role: Role, addresses: Sequence[str] | None, security: Security
) -> tuple[Directory | StaticDirectory, int]:
    """A directory of a role's processes, and their number: of these addresses, or as the environment says."""
    job = JobEnvironment.read()
    if addresses is None and job.registry:
        return Directory(job.master, security), job.counts.get(role, 0)
    if addresses is None:
        addresses = job.addresses.get(role, ())
    return StaticDirectory({role: addresses}), len(addresses)


# A process registers with its job, and sends a heartbeat every second. `karvan.discovery.registry` is the
# other side, and describes the protocol.

_log = logging.getLogger("karvan.wire")

_BEAT = 1.0  # seconds between two heartbeats
_DEADLINE = 5.0  # seconds for one heartbeat


class Membership:
    """This process's entry in the registry, until `leave`.

    Registers at once; a registry that cannot be reached for `patience` seconds is a WireError, one that
    refuses this process a RefusedError. Later, it waits for a registry that is unreachable, and looks for one
    that moves.
    generation: the job's, when this process was started. count: how many processes the role has, if it is
    known, for those that look for all of them. beat: seconds between two heartbeats.
    """

    def __init__(
        self,
        registry: str | MasterAddress,
        role: Role,
        index: int,
        address: str,
        security: Security | None = None,
        generation: int = 0,
        *,
        count: int = 0,
        patience: float = 30.0,
        beat: float = _BEAT,
    ) -> None:
        self._beat = beat
        self.replaced = False  # whether another process has registered with this role and index
        self._registry = registry
        self._security = security
        self._fields = MemberFields(
            role=role,
            index=index,
            address=address,
            generation=generation,
            pid=os.getpid(),
            process=secrets.token_hex(8),
            count=count,
        )
        self._dumps = dump_stacks_on_signal()
        self._peer = self._connect()
        self._ended = threading.Event()
        try:
            self._peer.call(REGISTER, self._fields, deadline=patience)
        except Exception:
            self._peer.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"karvan-{role} {index}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Leave the registry; no error if it is unreachable."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(2 * _DEADLINE)
        with contextlib.suppress(WireError, RefusedError):
            if not self.replaced:
                self._peer.call(LEAVE, self._fields, deadline=1.0)
        self._peer.close()

    def _connect(self) -> Client:
        return Client("registry", self._registry, self._security, forgetful=True, patience=_DEADLINE)

    def _run(self) -> None:
        trouble = ""
        while not self._ended.wait(self._beat):
            try:
                beat = Beat(**vars(self._fields), activity=activity.report(self._dumps).as_head())
                answer = self._peer.call(BEAT, beat, deadline=_DEADLINE).head
                if answer.replaced:
                    self.replaced = True
                    _log.warning("%s %s was replaced by another process.", *self._name())
                    return
                if not answer.known:
                    self._peer.call(REGISTER, self._fields, deadline=_DEADLINE)
                if trouble:
                    _log.info("The registry at %s is back.", self._registry)
                trouble = ""
            except (WireError, RefusedError) as error:
                if self._peer.closing:
                    return  # the process is ending
                if str(error) != trouble:
                    _log.warning("%s %s: %s", *self._name(), error)
                trouble = str(error)
                self._peer.close()  # it has given up
                self._peer = self._connect()

    def _name(self) -> tuple[str, int]:
        return self._fields.role, self._fields.index


def member_from_environment(role: Role) -> Membership | None:
    """The membership of this process if a launched job started it for this role, which has no port."""
    job = JobEnvironment.read()
    if not job.registry or job.role != role:
        return None
    return Membership(
        *(job.master, role, job.index, socket.gethostname()),
        Security.from_environment(),
        job.generation,
        count=job.count,
    )
