"""A process's membership in its job: it registers, and sends a heartbeat every second.

`karvan.discovery.registry` is the other side, and describes the protocol.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading

from karvan.activity import activity, dump_stacks_on_signal
from karvan.job.address import MasterAddress
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.protocol.values import BEAT, LEAVE, REGISTER, Beat, MemberFields
from karvan.wire.client import Client
from karvan.wire.errors import RefusedError, WireError
from karvan.wire.security import Security

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
