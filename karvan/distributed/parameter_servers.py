"""A trainer's clients of parameter servers, one for each server and kind of work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from karvan.discovery.directory import Addresses, find_role
from karvan.distributed.step_commits import NoCommits, OwnCommits, StepCommits
from karvan.job.environment import MODES, JobEnvironment
from karvan.job.roles import Role
from karvan.protocol.parameter_server import ADD_TABLE, CHECK_FOLDER, RESTORE, SET_STATE
from karvan.wire import Array, Client, Message, Reply, Security
from karvan.wire.schema import A, Call

_FOUND_WITHIN = 5.0  # seconds of one attempt to find a server; repeated until the call's deadline


class Servers:
    """All servers; calls to several of them run at the same time."""

    def __init__(
        self,
        directory: Addresses,
        count: int,
        security: Security,
        hello: Mapping[str, Any],
        timeout: float,
        saved: str = "",
    ) -> None:
        self._saved = saved  # the folder of checkpoints from which a restarted server loads its rows
        self._declared: dict[str, dict[str, Any]] = {}
        self.declarations = 0  # so far
        self._restart_callbacks: list[Callable[[int, str], None]] = []
        self._incarnations: dict[int, str] = {}  # of servers that have restarted, the last one known
        self._directory = directory
        self._count = count
        self._security = security
        self._hello = hello
        self._timeout = timeout
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, int], Client] = {}
        self._stores = 0
        self._models = 0
        self.commits: NoCommits | StepCommits = NoCommits()
        if hello.get("elastic"):
            make = OwnCommits if MODES[hello["mode"]].dense_on_servers else StepCommits
            self.commits = make(hello["trainer"], count, self.peer)

    def __len__(self) -> int:
        return self._count

    @property
    def hello(self) -> Mapping[str, Any]:
        """The fields that they get about this trainer."""
        return self._hello

    def new_store(self) -> int:
        """A number for one more store, the same on all trainers if they create the same stores."""
        self._stores += 1
        return self._stores

    def new_model(self) -> int:
        """The same for one more model whose dense parameters are on the servers."""
        self._models += 1
        return self._models

    def peer(self, server: int, channel: str = "train") -> Client:
        """The client for a kind of work, connected when it is first used.

        train: lookups and gradients, in order; push: the gradients that a worker sends; ask: short requests;
        save: checkpoints, which take long; dense: dense parameters.
        """
        with self._lock:
            key = (channel, server)
            if key not in self._peers:
                self._peers[key] = Client(
                    f"parameter server {server}",
                    partial(self._directory.find, Role.PARAMETER_SERVER, server, _FOUND_WITHIN),
                    self._security,
                    hello={**self._hello, "server": server, "line": channel},
                    deadline=self._timeout,
                    on_restart=partial(self._restore, server) if self._saved else None,
                )
                if self._saved and self._declared:  # it may have restarted before this channel was used
                    self._peers[key].begin(RESTORE, {**self._restoring, "unless_tables": True})
            return self._peers[key]

    def begin_training(
        self,
        server: int,
        call: Call[Any, A],
        head: Mapping[str, Any],
        arrays: Sequence[Array],
        *,
        then: Callable[[Reply[A]], None] | None = None,
    ) -> Reply[A]:
        """Begin a `pull` or `push`, after earlier ones; in an elastic run it carries the newest commit."""
        return self.commits.begin(self.peer(server), server, call, head, arrays, then)

    def rejoin(self, run: str) -> None:
        """Become a member of another run, before anything was looked up: the last one is over."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            self._hello = {**self._hello, "run": run}
        for peer in peers:
            peer.close()
        for table, properties in self._declared.items():
            self.call(ADD_TABLE, {"spec": properties["spec"]}, channel="train")
            if "initial" in properties:
                head = {"table": table, "initial": properties["initial"], "fresh": False}
                self.call(SET_STATE, head, channel="train")

    @property
    def reloads(self) -> bool:
        """Whether a restarted server loads its rows from a checkpoint; otherwise a restart is an error."""
        return bool(self._saved)

    def declare(self, table: str, **properties: Any) -> None:
        """Set what a restarted server must know of a table."""
        self._declared.setdefault(table, {}).update(properties)
        self.declarations += 1

    @property
    def declared(self) -> Mapping[str, Mapping[str, Any]]:
        """The declared properties, by table."""
        return self._declared

    def on_restart(self, callback: Callable[[int, str], None]) -> None:
        """Call this with the number and the new incarnation of every server that restarts."""
        self._restart_callbacks.append(callback)

    def report_restart(self, server: int, incarnation: str) -> None:
        """A server has restarted: call the callbacks, once for each of its incarnations."""
        with self._lock:
            is_same = self._incarnations.get(server) == incarnation
            self._incarnations[server] = incarnation
        for callback in self._restart_callbacks if not is_same else ():
            callback(server, incarnation)

    def _restore(self, server: int, incarnation: str) -> list[tuple[Call[Any, Any], Mapping[str, Any]]]:
        self.report_restart(server, incarnation)
        return [(RESTORE, self._restoring)]

    @property
    def _restoring(self) -> dict[str, Any]:
        return {"tables": self._declared, "folder": self._saved}

    def call(
        self,
        call: Call[Any, A],
        head: Mapping[str, Any] | None = None,
        *,
        channel: str = "ask",
        of: Sequence[int] | None = None,
    ) -> list[Message[A]]:
        """The answers of all servers, or of some of them."""
        chosen = range(len(self)) if of is None else of
        replies = [self.peer(server, channel).begin(call, head) for server in chosen]
        return [reply.wait() for reply in replies]

    def check_folder(self, folder: str) -> None:
        """Raise a ValueError if one of the servers that hold tables could not save into a folder."""
        if self._declared:
            self.call(CHECK_FOLDER, {"folder": folder}, channel="save")

    def bytes(self) -> tuple[int, int]:
        """Bytes of arrays sent and received so far in training."""
        peers = [peer for (channel, _), peer in self._peers.items() if channel == "train"]
        return sum(peer.bytes_sent for peer in peers), sum(peer.bytes_received for peer in peers)

    def close(self) -> None:
        """Disconnect from all of them."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        self._directory.close()


def find_servers(
    addresses: Sequence[str] | None, hello: Mapping[str, Any], timeout: float, reload: bool = False
) -> Servers:
    """The servers at these addresses, or those that the environment names.

    reload: a restarted server loads its rows from a checkpoint, instead of being an error.
    """
    job, security = JobEnvironment.read(), Security.from_environment()
    directory, count = find_role(Role.PARAMETER_SERVER, addresses, security)
    if not count:
        raise RuntimeError(
            'connect("remote") expects servers=["host:port", …], or a program that `karvan launch` has '
            "started, got neither."
        )
    fields = {"generation": job.generation, **hello, "servers": count, "reload": reload}
    saved = job.checkpoints if reload else ""
    if reload and not saved:
        raise ValueError("A restarted server loads its rows from the folder KARVAN_CHECKPOINTS, got none.")
    return Servers(directory, count, security, fields, timeout, saved)
