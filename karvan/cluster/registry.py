"""The job's registry: who is there, where, and when it last gave a sign of life.

A role's process has a `Membership`. It registers (role, index, address, generation) and then says every
second that it lives; a registry that does not know it, because it has been restarted, asks it to register
again. Nobody is asked: who dies stops talking, and counts as lost some seconds later. Who leaves says so and
is forgotten.

A process that takes over a role and index replaces the one before, which learns it from its next sign of life
and stays silent from then on. The job's generation goes up when the job is rolled back; it is told to members
with every sign of life, and a process of an older generation can no longer register.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

from karvan.wire import Caller, Message, Peer, RefusedError, Security, Server, Service, WireError
from karvan.wire.directory import ROLES, Member

_log = logging.getLogger("karvan.cluster")

BEAT = 1.0  # seconds between two signs of life
_DEADLINE = 5.0  # seconds for a sign of life


@dataclass
class _Entry:
    process: str  # a random name, so that one that was replaced is not taken for the other
    address: str
    generation: int
    pid: int
    seen: float


class Registry(Service):
    """The registry, at a port of this machine, until `close`.

    lost_after: seconds without a sign of life after which a member counts as lost.
    """

    name = "registry"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        *,
        lost_after: float = 10.0,
        generation: int = 0,
    ) -> None:
        self.generation = generation
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._server = Server(self, host, port, security)

    @property
    def address(self) -> str:
        """Where it is."""
        return self._server.address

    def close(self) -> None:
        """Take no more calls."""
        self._server.close()

    def healthy(self, role: str, index: int) -> bool | None:
        """Whether it has given a sign of life lately; None: it never came, or has left."""
        with self._lock:
            entry = self._entries.get((role, index))
            return None if entry is None else self._silent(entry) <= self._lost_after

    def members(self) -> list[Member]:
        """All that came and did not leave."""
        with self._lock:
            return [self._member(*key) for key in sorted(self._entries)]

    def forget(self, role: str, index: int) -> None:
        """What is known of a process that has ended; another one will take its place."""
        with self._lock:
            self._entries.pop((role, index), None)

    def answer(self, call: Message, caller: Caller) -> Message:
        """Answer a member, or somebody who looks for one."""
        head = call.head
        match head.get("method"):
            case "register":
                return Message(self._register(head))
            case "beat":
                return Message(self._beat(head))
            case "leave":
                return Message(self._leave(head))
            case "members":
                return Message({"members": [vars(each) for each in self.members()]})
        return super().answer(call, caller)

    def _register(self, head: dict[str, Any]) -> dict[str, Any]:
        key = _key(head)
        match head:
            case {
                "address": str(address),
                "generation": int(generation),
                "pid": int(pid),
                "process": str(process),
            }:
                pass
            case _:
                raise RefusedError("A registration expects an address, a generation and a process.")
        with self._lock:
            before = self._entries.get(key)
            newest = max(self.generation, before.generation if before else 0)
            if generation < newest:
                raise RefusedError(
                    f"{key[0]} {key[1]} expected to be of generation {newest}, got {generation}: "
                    "the job has moved on without it."
                )
            self._entries[key] = _Entry(process, address, generation, pid, time.monotonic())
        if before is None or before.process != process:
            _log.info("%s %d is at %s", *key, address)
        return {"generation": self.generation}

    def _beat(self, head: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            entry = self._entries.get(_key(head))
            known = entry is not None and entry.process == head.get("process")
            if entry is not None and known:
                entry.seen = time.monotonic()
                entry.generation = max(entry.generation, int(head.get("generation", 0)))
            return {"generation": self.generation, "known": known, "replaced": bool(entry and not known)}

    def _leave(self, head: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            entry = self._entries.get(_key(head))
            if entry is not None and entry.process == head.get("process"):
                del self._entries[_key(head)]
        return {}

    def _silent(self, entry: _Entry) -> float:
        return time.monotonic() - entry.seen

    def _member(self, role: str, index: int) -> Member:
        entry = self._entries[role, index]
        silent = self._silent(entry)
        healthy = silent <= self._lost_after
        return Member(role, index, entry.address, entry.generation, entry.pid, healthy, round(silent, 3))


class Membership:
    """This process's place in the registry, until `leave`.

    Registers at once; a registry that cannot be reached for `patience` seconds is a WireError, one that does
    not want this process a RefusedError. Later on a registry that is gone is waited for.
    beat: seconds between two signs of life.
    """

    def __init__(
        self,
        registry: str,
        role: str,
        index: int,
        address: str,
        security: Security | None = None,
        generation: int = 0,
        *,
        patience: float = 30.0,
        beat: float = BEAT,
    ) -> None:
        self._beat = beat
        self.generation = generation  # of this process; may be set, and is told with the next sign of life
        self.job_generation = generation  # as the registry has last said
        self.replaced = False  # whether another process has taken this place
        self._registry = registry
        self._security = security
        self._who = {
            "role": role,
            "index": index,
            "address": address,
            "pid": os.getpid(),
            "process": secrets.token_hex(8),
        }
        self._peer = self._talk()
        self._ended = threading.Event()
        try:
            self._register(patience)
        except Exception:
            self._peer.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"karvan-{role} {index}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Say good-bye; a registry that is not there is left all the same."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(2 * _DEADLINE)
        with contextlib.suppress(WireError, RefusedError):
            if not self.replaced:
                self._call("leave", 1.0)
        self._peer.close()

    def _talk(self) -> Peer:
        return Peer("registry", self._registry, self._security, forgetful=True, patience=_DEADLINE)

    def _call(self, method: str, deadline: float) -> dict[str, Any]:
        head = {**self._who, "generation": self.generation}
        said = self._peer.call(method, head, deadline=deadline).head
        self.job_generation = int(said.get("generation", self.job_generation))
        return said

    def _register(self, patience: float) -> None:
        self._call("register", patience)

    def _run(self) -> None:
        trouble = ""
        while not self._ended.wait(self._beat):
            try:
                said = self._call("beat", _DEADLINE)
                if said["replaced"]:
                    self.replaced = True
                    _log.warning("%s %s was replaced by another process.", *self._name())
                    return
                if not said["known"]:
                    self._register(_DEADLINE)
                if trouble:
                    _log.info("The registry at %s is back.", self._registry)
                trouble = ""
            except (WireError, RefusedError) as error:
                if str(error) != trouble:
                    _log.warning("%s %s: %s", *self._name(), error)
                trouble = str(error)
                self._peer.close()  # it has given up
                self._peer = self._talk()

    def _name(self) -> tuple[Any, Any]:
        return self._who["role"], self._who["index"]


def _key(head: dict[str, Any]) -> tuple[str, int]:
    role, index = head.get("role"), head.get("index")
    if role not in ROLES or type(index) is not int or index < 0:
        raise RefusedError(
            f"A member expects a role of {', '.join(ROLES)} and an index, got {role!r} {index!r}."
        )
    return str(role), index
