"""`StepCommits`: the steps of an elastic run, as one member sends them to the parameter servers.

    commits = connection.servers.commits
    commits.begin_step(s)                        updates of stores from now on are staged for step s
    …                                            forward, backward and the sparse optimizers' step
    for staged in commits.staged(s):             pushes of this member, in the order in which they were made
        staged.wait()                            until all servers hold it; `staged.part` goes into the commit
    commits.commit(s, parts, scale, ack)         once the members agree that the step happened

A commit is sent with the next lookup or push to each server, which sees the committed rows then, or by `send`
at once. `flush` waits until all servers have it. That is needed before servers are called in another way;
stores do it for requests about tables, and captures. If the step did not happen, `drop` it: its lookups stay
at the servers, and `restage` pushes the same gradients again, under a new number, or `release` gives them up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from karvan.protocol import parameter_server as protocol
from karvan.wire import Array, Client, Message, Reply
from karvan.wire.schema import A, Call

_AHEAD = 64  # commits that a server may not have been sent yet, before they are sent by themselves


class Progress(NamedTuple):
    """How far a server is: its last committed step, the ack of that, and what is staged.

    staged: step, member and sequence of each push.
    """

    committed: int | None
    ack: Any
    staged: list[tuple[int, int, int]]


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


class NoCommits:
    """In a run that is not elastic: servers apply each push, nothing is committed."""

    elastic = False

    def begin(
        self,
        client: Client,
        server: int,
        call: Call[Any, A],
        head: Mapping[str, Any],
        arrays: Sequence[Array],
        then: Callable[[Reply[A]], None] | None,
    ) -> Reply[A]:
        """Begin a call, as it is."""
        return client.begin(call, head, arrays, then=then)

    def flush(self) -> None:
        """Do nothing."""


class StepCommits:
    """The commits of one member to so many servers; peer: the client of a server for lookups and pushes."""

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

    def begin(
        self,
        client: Client,
        server: int,
        call: Call[Any, A],
        head: Mapping[str, Any],
        arrays: Sequence[Array],
        then: Callable[[Reply[A]], None] | None,
    ) -> Reply[A]:
        """Begin a call that carries the newest commit; earlier ones go before it."""
        with self._changed:  # so that calls begin in the order in which they take commits
            self._send_unsent(server, leave=1)
            if not self._unsent[server]:
                return client.begin(call, head, arrays, then=then)
            carrying = {**head, "commit": self._unsent[server][0]}
            reply = client.begin(call, carrying, arrays, then=self._told(then))
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

    def _told(self, then: Callable[[Reply[A]], None] | None) -> Callable[[Reply[A]], None]:
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

    def progress(self) -> list[Progress]:
        """How far each server is."""
        answers = [answer.head for answer in self._call(protocol.PROGRESS, {})]
        return [Progress(answer.committed, answer.ack, answer.staged) for answer in answers]

    def _call(self, call: Call[Any, A], head: Mapping[str, Any]) -> list[Message[A]]:
        """The answers of all servers, after this member's earlier lookups and pushes."""
        replies = [self._peer(server).begin(call, head) for server in self._unsent]
        return [reply.wait() for reply in replies]


# `OwnCommits`: the steps of one member in an elastic run of mode async, in which nobody waits for others.
#
#     commits = connection.servers.commits
#     step = commits.begin_own()                   what stores and dense parameters send from now on is staged
#     …                                            forward, backward, the optimizers' steps
#     sent = commits.commit_own(counts, ack)       when all servers hold all of it
#     sent.wait()                                  the tally, once all servers have committed the step
#
# The next step is committed only when all servers have this one, so they never differ by more than one.
#
# The others settle a member that is gone: `settle` fences it, and completes the step that only some servers
# have committed. See `karvan/cluster/parameter_server/batches.py`.


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
    """The commits of one member to so many servers."""

    def __init__(self, member: int, servers: int, peer: Callable[[int], Client]) -> None:
        super().__init__(member, servers, peer)
        self._dense: list[int] = []
        self._servers = servers
        self._last: SentCommit | None = None

    def begin_own(self) -> int:
        """The member's next step begins; its number."""
        self.begin_step(self.step + 1)
        self._dense = []
        return self.step

    def note_dense(self, model: int) -> None:
        """All servers have staged gradients of a model's dense parameters for the step."""
        self._dense.append(model)

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
            "dense": list(self._dense),
            "scale": 1.0,
            "counts": dict(counts),
            "ack": ack,
        }
        self._last = SentCommit(
            [self._peer(server).begin(protocol.COMMIT, commit) for server in range(self._servers)]
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
