"""`OwnStepBatches`: the batches of an elastic run in mode async, in which every member has steps of its own.

A step of a member is one batch. Its gradients of rows (`push`) and of dense parameters (`stage_dense`) are
staged at all servers; then the member sends the commit to all of them, and each applies its part at once. It
says how many records are done (`ack`) and what to count. A member commits a step at a server only when all
servers have committed the one before.

If a member dies, its last step counts exactly when a server has committed it. Whoever finds that out fences
the member, asks all servers for its progress, and sends the last commit to those that lack it, which have the
parts. So servers never differ by more than one step of a member.

Servers also add up what was committed by all members: the *tally*. Every answer to a commit has it, so that
members know how far the job is without asking each other; and the number of the next *meeting* that a member
has asked for, to which all of them come after the batch that they compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from karvan.cluster.parameter_server.dense_parameters import DenseParameters
from karvan.cluster.parameter_server.dense_service import DenseService, settings_of
from karvan.cluster.parameter_server.elastic_requests import ElasticBatches
from karvan.cluster.parameter_server.server_tables import ServerTables
from karvan.dense.tensors import dense_tensor, tensors_of
from karvan.protocol.parameter_server import STAGE_DENSE, Commit, Meeting, OfMember, ServerHello, StageDense
from karvan.store.row_owner import Owner
from karvan.wire import Message, RefusedError, Request

_MOST_STAGED = 64  # gradients of dense parameters of one member; more than a step has models


@dataclass(frozen=True, eq=False)
class _StagedDense:
    """A member's gradients of a model's parameters, for one of its steps."""

    step: int
    version: int
    lr: float | None
    gradients: Mapping[str, Tensor]


class OwnStepBatches(ElasticBatches):
    """The batches of one elastic run in mode async; dense: the models of the server."""

    own_steps = True

    def __init__(
        self,
        owner: Owner,
        tables: ServerTables,
        hello: ServerHello,
        dense: DenseService,
        *,
        counts_skips: bool = True,
    ) -> None:
        super().__init__(owner, tables, hello, counts_skips=counts_skips)
        if settings_of(hello).rejects:
            raise RefusedError(
                "expected an elastic run without grads_to_wait and tolerance, as a gradient that waits for "
                "others is lost with its trainer, got one of them."
            )
        self._dense = dense
        self._staged_dense: dict[tuple[int, int], _StagedDense] = {}  # by member and model
        self._tally: dict[str, int] = {"batches": 0}
        self._meeting = 0
        self.endpoints.append(self._guarded(STAGE_DENSE, self._stage_dense))

    def _stage_dense(self, member: int, call: Request[StageDense]) -> Message:
        head = call.head
        step, number = head.step, head.model
        model = self._dense.model(number)
        self._members.note(member)
        staged = self._staged_dense.get((member, number))
        done = self._committed_step(member)
        if step > done and (staged is None or staged.step != step):
            if staged is not None and staged.step > done:
                raise RefusedError(f"expected gradients of step {staged.step}, got some of step {step}.")
            if sum(other == member for other, _ in self._staged_dense) >= _MOST_STAGED:
                raise RefusedError(f"expected up to {_MOST_STAGED} models in a step, got one more.")
            gradients = {
                name: dense_tensor(name, each, copy=True)
                for name, each in tensors_of(head.tensors, call.arrays).items()
            }
            self._check(model, gradients)
            self._staged_dense[member, number] = _StagedDense(step, head.version, head.lr, gradients)
        return Message({"version": model.version})

    def _check(self, model: DenseParameters, gradients: Mapping[str, Tensor]) -> None:
        try:
            model.expect(gradients)  # a commit must not fail
        except (ValueError, RuntimeError) as error:
            raise RefusedError(str(error)) from error

    def _commit(self, member: int, call: Request[Commit]) -> Message:
        whose = self._whose(call.head.member)
        if whose != member and whose not in self._members.fenced:
            raise RefusedError(
                f"expected a commit of member {member}'s own step, or of a member that is fenced off, got "
                f"member {whose}."
            )
        self._members.note(member)
        super()._commit(member, call)
        return self._answer()

    @override
    def _find_more(self, commit: Commit) -> None:
        assert commit.member is not None
        for number in commit.dense:
            staged = self._staged_dense.get((commit.member, number))
            if staged is None or staged.step != commit.step:
                raise RefusedError(
                    f"expected gradients of model {number} that are staged for step {commit.step} of "
                    f"member {commit.member}, got none: they would be lost."
                )

    @override
    def _apply_more(self, commit: Commit) -> None:
        member, step = commit.member, commit.step
        assert member is not None
        for number in commit.dense:
            staged = self._staged_dense[member, number]
            answer = self._dense.model(number).push_gradients(
                staged.gradients, staged.version, trainer=_name(member), sequence=step, lr=staged.lr
            )
            if not answer.accepted:
                raise RuntimeError(f"the gradients of model {number} are not accepted: {answer.reason}")
        for key in [each for each in self._staged_dense if each[0] == member]:
            del self._staged_dense[key]
        self._tally["batches"] += 1
        for name, count in commit.counts.items():
            self._tally[name] = self._tally.get(name, 0) + count

    def _abandon(self, member: int, call: Request[OfMember]) -> Message:
        gone = call.head.member
        models = {number for whose, number in self._staged_dense if whose == gone}
        for number in models:
            del self._staged_dense[gone, number]
        self._dense.forget(_name(gone))
        return super()._abandon(member, call)

    def _answer_tally(self, member: int, call: Request[Meeting]) -> Message:
        """The tally; a member may ask for the meeting of a number, which stays until that has been."""
        self._meeting = max(self._meeting, call.head.meeting)
        return self._answer()

    def _answer(self) -> Message:
        return Message({"tally": dict(self._tally), "meeting": self._meeting})


def _name(member: int) -> str:
    """The name under which dense parameters know a member."""
    return f"member-{member}"
