"""Dense parameters on parameter servers, of trainers that come and go (mode async with sharding: dynamic).

As in `remote.py`, a trainer pulls parameters, computes, and pushes gradients. But servers only stage what it
pushes, and apply it when the trainer commits its step (`distributed/clients/own_commits.py`): together with
the gradients of rows, at all servers or at none.

Nobody sends parameters to the servers by itself: one trainer does when a run begins (`fill`), and those who
come later take what is there (`join`).
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from karvan.dense.remote import RemoteDense
from karvan.dense.server_proxy import DenseServerProxy
from karvan.dense.step_policies import Answer, Outcome
from karvan.dense.tensor_checks import Array
from karvan.dense.wire_format import tensors_message
from karvan.distributed.clients.own_commits import OwnCommits


class StagingServerProxy(DenseServerProxy):
    """One server, at which gradients are staged for the step that this member has begun."""

    def push_gradients(
        self,
        gradients: Mapping[str, Array],
        version: int,
        *,
        trainer: str,
        sequence: int,
        lr: float | None = None,
    ) -> Answer:
        """Stage gradients. The answer is that of a step: the commit will make one, or the trainer fails."""
        commits = self._servers.commits
        assert isinstance(commits, OwnCommits)
        head = {"version": version, "step": commits.step, "lr": lr}
        found = int(self._call("stage_dense", tensors_message(gradients, **head)).head["version"])
        return Answer(True, found + 1, True, found - version)


class ElasticDense(RemoteDense):
    """Parameters that step on parameter servers, when a step is committed."""

    proxy = StagingServerProxy

    @override
    def begin(self) -> None:
        """What servers have is decided by all trainers."""

    def fill(self) -> None:
        """The run begins with the parameters and optimizer state of this trainer."""
        self._fill()
        self.join()

    def join(self) -> None:
        """Take the parameters of the servers."""
        self._dense.join()

    @override
    def step(self) -> Outcome:
        """Gradients are staged."""
        outcome = super().step()
        if outcome == "accepted":
            commits = self._connection.servers and self._connection.servers.commits
            assert isinstance(commits, OwnCommits)
            commits.note_dense(self._number)
        return outcome

    @override
    def settle(self) -> None:
        """Trainers have met, and none has a step in progress."""
        self._dense.pull()

    @override
    def take(self) -> None:
        self.settle()
        self._take_slots()
