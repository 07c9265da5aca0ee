"""A trainer's clients of parameter servers, and the steps that it commits there in an elastic run."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from typing_extensions import override

from karvan.discovery.directory import Addresses, find_role
from karvan.job.environment import MODES, JobEnvironment
from karvan.job.roles import Role
from karvan.protocol import parameter_server as protocol
from karvan.protocol.parameter_server import ADD_TABLE, CHECK_FOLDER, RESTORE, SET_STATE
from karvan.wire import Array, Client, Message, Reply, Security
from karvan.wire.schema import A, Call

_AHEAD = 64  # commits that a server may not have been sent yet, before they are sent by themselves


class StagedPart(Protocol):
    """A push that servers hold, or will hold; see `karvan.store.remote.staged_updates`."""

    step: int
    sequence: int

    @property
    def part(self) -> tuple[int, int]:
        """Member and sequence, as commits name it."""

    def wait(self) -> None:
        """Return when all servers hold it; raises what went wrong."""

    def restage(self) -> StagedPart:
        """Push the same gradients again, under a new number, for the step that has begun."""

    def release(self) -> None:
        """Give the batch up: neither its gradients nor its lookups are needed any more."""


Sent: TypeAlias = Mapping[str, Any]  # the head of a call
Then: TypeAlias = Callable[[Reply[A]], None] | None  # what is called with the reply to a call


class NoCommits:
    """In a run that is not elastic: servers apply each push, nothing is committed."""

    elastic = False

    def begin(self, server: int, start: Callable[..., Reply[A]], head: Sent, then: Then[A]) -> Reply[A]:
        """Start a call, as it is."""
        return start(head, then=then)

    def flush(self) -> None:
        """Do nothing."""


class StepCommits:
    """The commits of one member to so many servers; peer: the client of a server for lookups and pushes.

        commits = connection.servers.commits
        commits.begin_step(s)                        updates of stores from now on are staged for step s
        …                                            forward, backward and the sparse optimizers' step
        for staged in commits.staged(s):             pushes of this member, in their order
            staged.wait()                            until all hold it; `staged.part` goes into the commit
        commits.commit(s, parts, scale, ack)         once the members agree that the step happened

    A commit is sent with the next lookup or push to each server, which sees the committed rows then, or by
    `send` at once. `flush` waits until all servers have it. That is needed before servers are called in
    another way; stores do it for requests about tables, and captures. If the step did not happen, `drop` it:
    its lookups stay at the servers, and `restage` pushes the same gradients again, under a new number, or
    `release` gives them up.
    """

    elastic = True

    def __init__(self, member: int, servers: int, peer: Callable[[int], Client]) -> None:
        self.member = member
        self._peer = peer
        self.step = 0  # of updates from now on
        self._changed = threading.Condition(threading.RLock())
        self._sequence = 0
        self._staged: list[StagedPart] = []
        self._unsent: dict[int, deque[dict[str, Any]]] = {server: deque() for server in range(servers)}
        self._in_flight = 0  # calls that carry a commit
        self._failure: Exception | None = None

    def begin_step(self, step: int) -> None:
        """Updates of stores are staged for this step from now on."""
        self.step = step

    def next_sequence(self) -> int:
        """A number for one more push of this member."""
        with self._changed:
            self._sequence += 1
            return self._sequence

    def add(self, staged: StagedPart) -> None:
        """A push is being staged."""
        with self._changed:
            self._staged.append(staged)

    def staged(self, step: int) -> list[StagedPart]:
        """This member's pushes for a step that are not committed, in the order of their numbers."""
        with self._changed:
            return [push for push in self._staged if push.step == step]

    def forget(self, staged: StagedPart) -> None:
        """A push was released, or replaced by another one."""
        with self._changed:
            self._staged = [push for push in self._staged if push is not staged]

    def commit(self, step: int, parts: Sequence[tuple[int, int]], scale: float, ack: Any = None) -> None:
        """The members agree that a step consists of these pushes: it is sent with the next calls.

        parts: (member, sequence) of pushes that all servers have staged, in the order in which to apply them.
        scale: the factor of all gradients. ack: kept by servers with the step, for `progress`.
        """
        commit = {"step": step, "parts": [list(part) for part in parts], "scale": scale, "ack": ack}
        with self._changed:
            for server, unsent in self._unsent.items():
                unsent.append(commit)
                if len(unsent) > _AHEAD:
                    self._send_unsent(server, leave=1)
            over = [push for push in self._staged if push.step <= step]
        for push in over:
            push.release()

    def begin(self, server: int, start: Callable[..., Reply[A]], head: Sent, then: Then[A]) -> Reply[A]:
        """Start a call that carries the newest commit; earlier ones go before it."""
        with self._changed:  # so that calls begin in the order in which they take commits
            self._send_unsent(server, leave=1)
            if not self._unsent[server]:
                return start(head, then=then)
            reply = start({**head, "commit": self._unsent[server][0]}, then=self._told(then))
            self._sent(server)
            return reply

    def _send_unsent(self, server: int, *, leave: int = 0) -> None:
        unsent = self._unsent[server]
        while len(unsent) > leave:
            self._peer(server).begin(protocol.COMMIT, unsent[0], then=self._told(None))
            self._sent(server)

    def _sent(self, server: int) -> None:
        self._unsent[server].popleft()
        self._in_flight += 1

    def _told(self, then: Then[A]) -> Callable[[Reply[A]], None]:
        def answered(reply: Reply[A]) -> None:
            with self._changed:
                self._in_flight -= 1
                self._failure = self._failure or reply.error
                self._changed.notify_all()
            if then is not None:
                then(reply)

        return answered

    def send(self) -> None:
        """Send all commits now, without waiting: servers apply them before the next lookup comes."""
        with self._changed:
            for server in self._unsent:
                self._send_unsent(server)

    def flush(self) -> None:
        """Return when all servers have all commits; raises what went wrong."""
        with self._changed:
            self.send()
            self._changed.wait_for(lambda: self._in_flight == 0)
            if self._failure is not None:
                raise self._failure

    def drop(self, step: int) -> None:
        """This step and later ones did not happen: servers drop their pushes, of all members."""
        self.flush()
        self._call(protocol.DROP, {"step": step})

    def members(self, round_number: int) -> list[int]:
        """The members that have trained, as any server knows them, with this one, which is in this round.

        A RefusedError if others are in a newer round.
        """
        answers = self._call(protocol.MEMBERS_IN_ROUND, {"round": round_number})
        return sorted({member for answer in answers for member in answer.head.members})

    def fence(self, member: int) -> None:
        """A member may be gone: servers refuse its calls from now on, and keep what it has pushed."""
        self._call(protocol.FENCE, {"member": member})

    def abandon(self, member: int) -> None:
        """A member is gone, or this one leaves: servers drop what it has pushed and looked up."""
        self.flush()
        self._call(protocol.ABANDON, {"member": member})

    def progress(self) -> list[protocol.ProgressAnswer]:
        """How far each server is: its last committed step, the ack of that, and what is staged."""
        return [answer.head for answer in self._call(protocol.PROGRESS, {})]

    def _call(self, call: Call[Any, A], head: Mapping[str, Any]) -> list[Message[A]]:
        """The answers of all servers, after this member's earlier lookups and pushes."""
        replies = [self._peer(server).begin(call, head) for server in self._unsent]
        return [reply.wait() for reply in replies]


class Tally(NamedTuple):
    """What all members have committed in this run, and the number of the last meeting that was asked for."""

    counts: dict[str, int]
    meeting: int

    @property
    def batches(self) -> int:
        """How many steps of members."""
        return self.counts["batches"]


class SentCommit:
    """A commit that is on its way to all servers."""

    def __init__(self, replies: list[Reply[protocol.CommitAnswer]]) -> None:
        self._replies = replies

    def wait(self) -> Tally:
        """Return when all servers have committed the step; raises what went wrong."""
        return _tally_of(*(reply.wait().head for reply in self._replies))


class OwnCommits(StepCommits):
    """The commits of one member to so many servers.

        commits = connection.servers.commits
        step = commits.begin_own()                   what stores and parameters send from now on is staged
        …                                            forward, backward, the optimizers' steps
        sent = commits.commit_own(counts, ack)       when all servers hold all of it
        sent.wait()                                  the tally, once all servers have committed the step

    The next step is committed only when all servers have this one, so they never differ by more than one.

    The others settle a member that is gone: `settle` fences it, and completes the step that only some servers
    have committed. See `karvan/cluster/parameter_server/elastic_batches.py`.
    """

    def __init__(self, member: int, servers: int, peer: Callable[[int], Client]) -> None:
        super().__init__(member, servers, peer)
        self.dense: list[int] = []  # models whose dense gradients all servers have staged for the step
        self._last: SentCommit | None = None

    def begin_own(self) -> int:
        """The member's next step begins; its number."""
        self.begin_step(self.step + 1)
        self.dense = []
        return self.step

    def commit_own(self, counts: Mapping[str, int], ack: Any) -> SentCommit:
        """Commit the step that has begun. counts: for the tally. ack: what others need if this member dies.

        It returns when all servers have staged the step, and the commit is sent; lookups that begin from now
        on see it.
        """
        staged = self.staged(self.step)
        for push in staged:
            push.wait()
        commit = {
            "member": self.member,
            "step": self.step,
            "parts": [list(push.part) for push in staged],
            "dense": list(self.dense),
            "scale": 1.0,
            "counts": dict(counts),
            "ack": ack,
        }
        self._last = SentCommit(
            [self._peer(server).begin(protocol.COMMIT, commit) for server in self._unsent]
        )
        for push in staged:
            push.release()
        return self._last

    @override
    def flush(self) -> None:
        super().flush()
        if self._last is not None:
            self._last.wait()

    def ask(self, meeting: int = 0) -> Tally:
        """The tally; asks all members to come to the meeting of this number, unless it is 0."""
        return _tally_of(*(answer.head for answer in self._call(protocol.TALLY, {"meeting": meeting})))

    def settle(self, member: int) -> Any:
        """A member is gone: complete its last step; returns what its commit said, None if it made none.

        From now on servers refuse its calls.
        """
        self.fence(member)
        answers = [answer.head for answer in self._call(protocol.PROGRESS, {"member": member})]
        last = max(-1 if answer.committed is None else answer.committed for answer in answers)
        if last < 0:
            return None
        commit = next(answer.commit for answer in answers if answer.committed == last)
        assert commit is not None
        late = [server for server, answer in enumerate(answers) if answer.committed != last]
        for reply in [self._peer(server).begin(protocol.COMMIT, commit) for server in late]:
            reply.wait()
        return commit.ack


def _tally_of(*answers: protocol.CommitAnswer | protocol.TallyAnswer) -> Tally:
    """That of the first server: all have the same, apart from steps that are being committed."""
    tally, meeting = answers[0].tally, answers[0].meeting
    assert tally is not None
    assert meeting is not None
    return Tally(tally, meeting)


_FOUND_WITHIN = 5.0  # seconds of one attempt to find a server; repeated until the call's deadline


class ServiceClients(ABC):
    """The clients of a role's services, one for each service and kind of work, connected when first used.

    hello: the fields that services get about this trainer.
    """

    def __init__(self, hello: Mapping[str, Any], security: Security, timeout: float) -> None:
        self.hello = hello
        self._security = security
        self._timeout = timeout
        self._lock = threading.Lock()
        self._peers: dict[tuple[int, str], Client] = {}

    @abstractmethod
    def _connect(self, number: int, channel: str) -> Client:
        """A client of a service for a kind of work."""

    def peer(self, number: int, channel: str = "train") -> Client:
        """The client of a service for a kind of work."""
        with self._lock:
            if (number, channel) not in self._peers:
                self._peers[number, channel] = self._connect(number, channel)
            return self._peers[number, channel]

    def rejoin(self, run: str) -> None:
        """Become a member of another elastic run, before anything was looked up: the last one is over."""
        self.hello = {**self.hello, "run": run}
        self._disconnect()

    def _disconnect(self) -> None:
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()


class Servers(ServiceClients):
    """All servers; calls to several of them run at the same time.

    Kinds of work are: "train", lookups and gradients, in order; "push", the gradients that a worker sends;
    "ask", short requests; "save", checkpoints, which take long; "dense", dense parameters.
    """

    def __init__(
        self,
        directory: Addresses,
        count: int,
        security: Security,
        hello: Mapping[str, Any],
        timeout: float,
        saved: str = "",
    ) -> None:
        super().__init__(hello, security, timeout)
        self._saved = saved  # the folder of checkpoints from which a restarted server loads its rows
        self.reloads = bool(saved)  # whether it does; otherwise a restart is an error
        self.declared: dict[str, dict[str, Any]] = {}  # what a restarted server must know, by table
        self.declarations = 0  # so far
        self._restart_callbacks: list[Callable[[int, str], None]] = []
        self._incarnations: dict[int, str] = {}  # of servers that have restarted, the last one known
        self._directory = directory
        self._count = count
        self._stores = 0
        self._models = 0
        self.commits: NoCommits | StepCommits = NoCommits()
        if hello.get("elastic"):
            make = OwnCommits if MODES[hello["mode"]].dense_on_servers else StepCommits
            self.commits = make(hello["trainer"], count, self.peer)

    def __len__(self) -> int:
        return self._count

    def new_store(self) -> int:
        """A number for one more store, the same on all trainers if they create the same stores."""
        self._stores += 1
        return self._stores

    def new_model(self) -> int:
        """The same for one more model whose dense parameters are on the servers."""
        self._models += 1
        return self._models

    @override
    def _connect(self, number: int, channel: str) -> Client:
        client = Client(
            f"parameter server {number}",
            partial(self._directory.find, Role.PARAMETER_SERVER, number, _FOUND_WITHIN),
            self._security,
            hello={**self.hello, "server": number, "line": channel},
            deadline=self._timeout,
            on_restart=partial(self._restore, number) if self._saved else None,
        )
        if self._saved and self.declared:  # it may have restarted before this channel was used
            client.begin(RESTORE, {**self._restoring, "unless_tables": True})
        return client

    def begin_training(
        self,
        server: int,
        call: Call[Any, A],
        head: Mapping[str, Any],
        arrays: Sequence[Array],
        *,
        then: Then[A] = None,
    ) -> Reply[A]:
        """Begin a `pull` or `push`, after earlier ones; in an elastic run it carries the newest commit."""
        start = partial(self.peer(server).begin, call, arrays=arrays)
        return self.commits.begin(server, start, head, then)

    @override
    def rejoin(self, run: str) -> None:
        super().rejoin(run)
        for table, properties in self.declared.items():
            self.call(ADD_TABLE, {"spec": properties["spec"]}, channel="train")
            if "initial" in properties:
                head = {"table": table, "initial": properties["initial"], "fresh": False}
                self.call(SET_STATE, head, channel="train")

    def declare(self, table: str, **properties: Any) -> None:
        """Set what a restarted server must know of a table."""
        self.declared.setdefault(table, {}).update(properties)
        self.declarations += 1

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
        return {"tables": self.declared, "folder": self._saved}

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
        if self.declared:
            self.call(CHECK_FOLDER, {"folder": folder}, channel="save")

    def bytes(self) -> tuple[int, int]:
        """Bytes of arrays sent and received so far in training."""
        peers = [peer for (_, channel), peer in self._peers.items() if channel == "train"]
        return sum(peer.bytes_sent for peer in peers), sum(peer.bytes_received for peer in peers)

    def close(self) -> None:
        """Disconnect from all of them."""
        self._disconnect()
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
