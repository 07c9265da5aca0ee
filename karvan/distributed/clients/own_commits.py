"""`OwnCommits`: the steps of one member in an elastic run of mode async, in which nobody waits for others.

    commits = connection.servers.commits
    step = commits.begin_own()                   what stores and dense parameters send from now on is staged
    …                                            forward, backward, the optimizers' steps
    sent = commits.commit_own(counts, ack)       when all servers hold all of it
    sent.wait()                                  the tally, once all servers have committed the step

The next step is committed only when all servers have this one, so they never differ by more than one.

The others settle a member that is gone: `settle` fences it, and completes the step that only some servers
have committed. See `karvan/cluster/parameter_server/elastic/own_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from typing_extensions import override

from karvan.distributed.clients.step_commits import StepCommits
from karvan.wire import Client, Message, Reply


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

    def __init__(self, replies: list[Reply]) -> None:
        self._replies = replies

    def wait(self) -> Tally:
        """Return when all servers have committed the step; raises what went wrong."""
        return _tally_of([reply.wait() for reply in self._replies])


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
        for each in staged:
            each.wait()
        commit = {
            "member": self.member,
            "step": self.step,
            "parts": [list(each.part) for each in staged],
            "dense": list(self._dense),
            "scale": 1.0,
            "counts": dict(counts),
            "ack": ack,
        }
        self._last = SentCommit(
            [self._peer(server).begin("commit", commit) for server in range(self._servers)]
        )
        for each in staged:
            each.release()
        return self._last

    @override
    def flush(self) -> None:
        super().flush()
        if self._last is not None:
            self._last.wait()

    def ask(self, meeting: int = 0) -> Tally:
        """The tally; asks all members to come to the meeting of this number, unless it is 0."""
        return _tally_of(self._call("tally", {"meeting": meeting}))

    def settle(self, member: int) -> Any:
        """A member is gone: complete its last step; returns what its commit said, None if it made none.

        From now on servers refuse its calls.
        """
        self.fence(member)
        found = [answer.head for answer in self._call("progress", {"member": member})]
        last = max(-1 if each["committed"] is None else each["committed"] for each in found)
        if last < 0:
            return None
        commit = next(each["commit"] for each in found if each["committed"] == last)
        late = [server for server, each in enumerate(found) if each["committed"] != last]
        for reply in [self._peer(server).begin("commit", commit) for server in late]:
            reply.wait()
        return commit["ack"]


def _tally_of(answers: list[Message]) -> Tally:
    """That of the first server: all have the same, apart from steps that are being committed."""
    head = answers[0].head
    return Tally(dict(head["tally"]), head["meeting"])
