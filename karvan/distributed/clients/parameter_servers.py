"""A trainer's clients of parameter servers, one for each server and kind of work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from karvan.discovery.directory import Addresses, find_role
from karvan.job.environment import JobEnvironment
from karvan.job.roles import Role
from karvan.protocol.parameter_server import SERVER_CALLS
from karvan.wire import Client, Message, Security

_FOUND_WITHIN = 5.0  # seconds; who does not find one tries again until the call's deadline


class Servers:
    """All servers; calls to several of them are under way at once."""

    def __init__(
        self,
        directory: Addresses,
        count: int,
        security: Security,
        hello: Mapping[str, Any],
        timeout: float,
        saved: str = "",
    ) -> None:
        self._saved = saved  # the folder of checkpoints from which a lost server's rows are taken
        self._declared: dict[str, dict[str, Any]] = {}
        self.declarations = 0  # so far
        self._lost: list[Callable[[int, str], None]] = []
        self._lives: dict[int, str] = {}  # of servers that have begun anew, the last one known
        self._directory = directory
        self._count = count
        self._security = security
        self._hello = hello
        self._timeout = timeout
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, int], Client] = {}
        self._stores = 0
        self._models = 0

    def __len__(self) -> int:
        return self._count

    @property
    def hello(self) -> Mapping[str, Any]:
        """What they are told of this trainer."""
        return self._hello

    def new_store(self) -> int:
        """A number for one more store, the same on all trainers if they make the same ones."""
        self._stores += 1
        return self._stores

    def new_model(self) -> int:
        """The same for one more model whose dense parameters are on the servers."""
        self._models += 1
        return self._models

    def peer(self, server: int, line: str = "train") -> Client:
        """The peer for a kind of work, connected when it is first used.

        train: lookups and gradients, in order; push: the gradients that a worker sends; ask: questions; save:
        checkpoints, which take long; dense: dense parameters.
        """
        with self._lock:
            key = (line, server)
            if key not in self._peers:
                self._peers[key] = Client(
                    f"parameter server {server}",
                    partial(self._directory.find, Role.PARAMETER_SERVER, server, _FOUND_WITHIN),
                    self._security,
                    hello={**self._hello, "server": server, "line": line},
                    deadline=self._timeout,
                    calls=SERVER_CALLS,
                    on_restart=partial(self._restore, server) if self._saved else None,
                )
                if self._saved and self._declared:  # it may have restarted before this line was used
                    self._peers[key].begin("restore", {**self._restoring, "unless_tables": True})
            return self._peers[key]

    @property
    def reloads(self) -> bool:
        """Whether a server that has restarted takes its rows as they were saved; otherwise it is an error."""
        return bool(self._saved)

    def declare(self, table: str, **told: Any) -> None:
        """What a server that begins anew must know of a table."""
        self._declared.setdefault(table, {}).update(told)
        self.declarations += 1

    @property
    def declared(self) -> Mapping[str, Mapping[str, Any]]:
        """What was declared, by table."""
        return self._declared

    def when_lost(self, tell: Callable[[int, str], None]) -> None:
        """Whom to tell the number of a server that has begun anew, and the name of its new life."""
        self._lost.append(tell)

    def note_loss(self, server: int, life: str) -> None:
        """A server has begun anew: those who want to know are told, once for each of its lives."""
        with self._lock:
            known = self._lives.get(server) == life
            self._lives[server] = life
        for tell in self._lost if not known else ():
            tell(server, life)

    def _restore(self, server: int, life: str) -> list[tuple[str, Mapping[str, Any]]]:
        self.note_loss(server, life)
        return [("restore", self._restoring)]

    @property
    def _restoring(self) -> dict[str, Any]:
        return {"tables": self._declared, "folder": self._saved}

    def call(
        self,
        method: str,
        head: Mapping[str, Any] | None = None,
        *,
        line: str = "ask",
        of: Sequence[int] | None = None,
    ) -> list[Message]:
        """The answers of all servers, or of some of them."""
        chosen = range(len(self)) if of is None else of
        replies = [self.peer(server, line).begin(method, head) for server in chosen]
        return [reply.wait() for reply in replies]

    def check_folder(self, folder: str) -> None:
        """Raise a ValueError if one of the servers that hold tables could not save into a folder."""
        if self._declared:
            self.call("check_folder", {"folder": folder}, line="save")

    def bytes(self) -> tuple[int, int]:
        """Bytes of arrays sent and received so far in training."""
        peers = [peer for (line, _), peer in self._peers.items() if line == "train"]
        return sum(peer.bytes_sent for peer in peers), sum(peer.bytes_received for peer in peers)

    def close(self) -> None:
        """Leave all of them."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        self._directory.close()


def find_servers(
    addresses: Sequence[str] | None, hello: Mapping[str, Any], timeout: float, reload: bool = False
) -> Servers:
    """The servers at these addresses, or those that the environment names.

    reload: one that has begun anew takes its rows as they were saved, instead of being an error.
    """
    job, security = JobEnvironment.read(), Security.from_environment()
    directory, count = find_role(Role.PARAMETER_SERVER, addresses, security)
    if not count:
        raise RuntimeError(
            'connect("remote") expects servers=["host:port", …], or a program that `karvan launch` has '
            "started, got neither."
        )
    told = {"generation": job.generation, **hello, "servers": count, "reload": reload}
    saved = job.checkpoints if reload else ""
    if reload and not saved:
        raise ValueError("A lost server's rows are taken from KARVAN_CHECKPOINTS, a folder, got none.")
    return Servers(directory, count, security, told, timeout, saved)
