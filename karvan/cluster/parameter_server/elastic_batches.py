"""`ElasticBatches`: a parameter server's staged pushes and commits in an elastic run.

    push      stages the gradients of lookups, as part of a step; nothing is applied
    commit    applies exactly these pushes, in this order, drops all others up to this step
    drop      the step did not happen: its pushes go, its lookups stay, and members push it again
    fence     a member may be gone: whatever still comes from it is refused, its pushes stay
    abandon   a member is gone: its pushes and lookups go
    progress  the last committed step, what its commit said, and what is staged
    members   those that have trained and are not abandoned; asked by members of the newest round alone

Members push a step's gradients, exchange the dense ones, and agree whether the step happened. If it did,
each of them sends the commit to each server, by itself or in the head of its next `pull` or `push`, which
see the committed rows then. The first commit of a step applies it; the others change nothing.

So a member may die at any moment. A step is committed only after all servers have staged its parts.
Survivors fence the dead member, which may only be silent. If they find by `progress` that a server has
committed a step, they send the commit to the other servers, which have the parts; if no server has, they
commit or drop the step, as they agree. Then they abandon the dead member.

In mode async every member has steps of its own, and its commits and drops name it: see `OwnStepBatches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from typing_extensions import override

from karvan.cluster.parameter_server.batches import Batches, expect_same_tables
from karvan.cluster.parameter_server.dense_parameters import AnswerWindow, DenseService, settings_of
from karvan.cluster.parameter_server.row_updates import HeldLookup, Pass, RowUpdates, WholePush
from karvan.dense.steps import dense_tensor
from karvan.dense.wire_format import tensors_of
from karvan.protocol import parameter_server as protocol
from karvan.wire import Message, RefusedError, Request

# `StagedPushes`: the gradients that a server holds until the trainers commit or drop their step.
#
# A push is known by its member and sequence. It is staged once, however often it is sent; one that a step was
# committed with is remembered, so that a late repetition is answered as done and not staged again.


class StagedPushes:
    """Staged pushes by member and sequence; a member has at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._staged: dict[tuple[int, int], WholePush] = {}
        self._committed: AnswerWindow[int, bool] = AnswerWindow(most)

    def holds(self, member: int, sequence: int, step: int, batches: Sequence[int]) -> bool:
        """Whether a push has been staged or committed before; a RefusedError if it must not be staged."""
        if self._committed.find(member, sequence):
            return True
        if (push := self._staged.get((member, sequence))) is not None:
            if (push.step, push.head.batches) != (step, batches):
                raise RefusedError(
                    f"expected push {sequence} of member {member} to be repeated as it was, of step "
                    f"{push.step} and batches {push.head.batches}, got step {step} and batches {batches}."
                )
            return True
        if self._committed.forgotten(member, sequence):
            raise RefusedError(f"expected one of member {member}'s newest pushes, got {sequence}.")
        staged = sum(other == member for other, _ in self._staged)
        if staged >= self._most:
            raise RefusedError(
                f"expected at most {self._most} staged pushes of a member, got one more of member {member}: "
                "commit or drop its steps first."
            )
        return False

    def add(self, push: WholePush) -> None:
        """Stage a push that is not held yet."""
        self._staged[push.name] = push

    def find(self, names: Iterable[tuple[int, int]], step: int) -> list[WholePush]:
        """These pushes, in this order; a RefusedError unless all are staged, and of the step."""
        pushes = []
        for member, sequence in names:
            push = self._staged.get((member, sequence))
            if push is None:
                raise RefusedError(
                    f"expected parts of step {step} that are staged, got push {sequence} of member {member}, "
                    "which is not here: its gradients would be lost."
                )
            if push.step != step:
                raise RefusedError(
                    f"expected parts of step {step}, got push {sequence} of member {member}, of step "
                    f"{push.step}."
                )
            pushes.append(push)
        return pushes

    def commit(self, parts: Iterable[WholePush]) -> None:
        """These have been applied."""
        for part in parts:
            del self._staged[part.name]
            self._committed.remember(part.member, part.head.sequence, True)

    def drop(self, chosen: Callable[[WholePush], bool]) -> list[WholePush]:
        """Remove and return the pushes for which `chosen` is true."""
        dropped = [push for push in self._staged.values() if chosen(push)]
        for push in dropped:
            del self._staged[push.name]
        return dropped

    def forget(self, member: int) -> None:
        """Forget the committed pushes of a member that will not come back."""
        self._committed.forget(member)

    def uses(self, lookup: HeldLookup) -> bool:
        """Whether a staged push has gradients of a lookup."""
        return any(lookup in push.lookups for push in self._staged.values())

    def names(self, chosen: Callable[[WholePush], bool]) -> list[tuple[int, int, int]]:
        """Step, member and sequence of staged pushes, sorted."""
        return sorted((push.step, *push.name) for push in self._staged.values() if chosen(push))


class ElasticBatches(Batches):
    """The batches of one elastic run. One lock guards each call: no commit comes between its parts."""

    own_steps = False  # whether each member has steps of its own

    def __init__(self, rows: RowUpdates, hello: protocol.ServerHello) -> None:
        if hello.reload:
            raise RefusedError(
                "expected an elastic run with on_server_loss rollback, got reload: rows of a checkpoint lack "
                "steps that the members have committed."
            )
        super().__init__(rows, hello)
        self._staged = StagedPushes(self._window)
        # The last one, by member if each has steps of its own, or of None.
        self._committed: dict[int | None, protocol.Commit] = {}
        self.on_abandon: Callable[[int], None] = lambda member: None
        self.endpoints += [
            self._guarded(protocol.COMMIT, self._commit),
            self._guarded(protocol.DROP, self._drop),
            self._guarded(protocol.FENCE, lambda member, call: self.members.fenced.add(call.head.member)),
            self._guarded(protocol.ABANDON, self._abandon),
            self._guarded(protocol.PROGRESS, self._progress),
            self._guarded(protocol.MEMBERS_IN_ROUND, self._list_members),
            self._guarded(protocol.TALLY, self._answer_tally),
        ]

    @override
    def end(self, reason: str) -> None:
        with self._lock:
            super().end(reason)
            self._release(self._staged.drop(lambda push: True))

    @override
    def between_steps(self) -> AbstractContextManager[Any]:
        return self._lock

    @override
    def count_used(self, store: int, used: Sequence[Sequence[int]]) -> None:
        """In an elastic run, lookups without a push count when members are done with them."""
        if any(used):
            raise RefusedError("expected no used lookups in the capture of an elastic run, got some.")

    @override
    def _is_staged(self, lookup: HeldLookup) -> bool:
        return self._staged.uses(lookup)

    @override
    def _expects(self, member: int, head: protocol.PushHead) -> bool:
        if head.step is None:
            raise RefusedError("expected the push of an elastic run to have a step, got none.")
        if self._staged.holds(member, head.sequence, head.step, head.batches):
            return False
        committed = self._committed_step(member if self.own_steps else None)
        if head.step <= committed:
            raise RefusedError(
                f"expected a push of a step after {committed}, got step {head.step}: steps up to "
                f"{committed} are committed without it."
            )
        self.members.trained.add(member)
        if list(head.positions) != list(range(len(head.batches))):
            raise RefusedError(
                f"expected all {len(head.batches)} passes of an elastic run's push at once and in order, got "
                f"{list(head.positions)}."
            )
        return True

    @override
    def _receive(self, member: int, head: protocol.PushHead, passes: Mapping[int, Pass]) -> None:
        expect_same_tables(list(passes.values()))
        self._rows.tables.check_rules(head.rules)  # a commit must not fail
        self._staged.add(WholePush(member, head, list(passes.values())))

    def _committed_step(self, whose: int | None) -> int:
        """The last step that is committed; -1 before the first."""
        return self._committed[whose].step if whose in self._committed else -1

    def _commit(self, member: int, call: Request[protocol.Commit]) -> Message | None:
        self._apply_commit(call.head)
        return None

    @override
    def _apply_commit(self, commit: protocol.Commit) -> None:
        """Apply a step, unless it was applied; a RefusedError changes nothing."""
        whose, step = self._whose(commit.member), commit.step
        if step <= self._committed_step(whose):
            return
        parts = self._staged.find(commit.parts, step)
        if other := next((part for part in parts if not _is_of(part, whose)), None):
            raise RefusedError(f"expected parts of member {whose}, got one of member {other.member}.")
        self._rows.check(parts)
        self._check_dense(commit)
        try:
            self._rows.apply(parts, commit.scale)
            self._apply_dense(commit)
        except Exception as error:
            # Rows may have some of it. A repetition would apply that twice, so nothing more is accepted.
            self._ended = f"the commit of step {step} has failed: {error}"
            raise
        self._staged.commit(parts)
        self._committed[whose] = commit
        self._release(self._staged.drop(lambda push: push.step <= step and _is_of(push, whose)))
        for part in parts:
            self.updates.add(part.head.store, part.member)
        self.pushes += len(parts)

    def _check_dense(self, commit: protocol.Commit) -> None:
        """A RefusedError if dense gradients that a commit names are not staged."""
        if commit.dense or commit.counts:
            raise RefusedError(
                "expected dense parameters and counts in commits of mode async alone, got some."
            )

    def _apply_dense(self, commit: protocol.Commit) -> None:
        """Apply what a commit has besides pushes: nothing, unless members have steps of their own."""

    def _drop(self, member: int, call: Request[protocol.Drop]) -> None:
        whose, first = self._whose(call.head.member), call.head.step
        self._release(self._staged.drop(lambda push: push.step >= first and _is_of(push, whose)))

    def _release(self, dropped: Iterable[WholePush]) -> None:
        """Undo the lookups of dropped pushes, except those that can still be pushed again."""
        open_lookups = set(self._lookups.values())
        lookups = [lookup for push in dropped for lookup in push.lookups if lookup not in open_lookups]
        self._rows.withdraw(lookup for lookup in lookups if not self._staged.uses(lookup))

    def _list_members(self, member: int, call: Request[protocol.RoundNumber]) -> Message:
        """The caller trains from now on, so it is one of them."""
        self.members.enter_round(call.head.round)
        self.members.trained.add(member)
        return Message({"members": self.members.present})

    def _answer_tally(self, member: int, call: Request[protocol.Meeting]) -> Message:
        raise RefusedError("expected an elastic run of mode async, got a request for a tally in another one.")

    def _abandon(self, member: int, call: Request[protocol.OfMember]) -> None:
        """A member is gone; it may be the caller itself, which leaves."""
        number = call.head.member
        self.members.abandon(number)
        self.on_abandon(number)
        dropped = self._staged.drop(lambda push: push.member == number)
        names = [name for name in self._lookups if name[0] == number]
        lookups = [self._lookups.pop(name) for name in names]
        self._rows.withdraw([*lookups, *(lookup for push in dropped for lookup in push.lookups)])
        self._staged.forget(number)
        self._committed.pop(number, None)
        for store in {store for _, store, _ in names}:
            self._over.forget((number, store))

    def _progress(self, member: int, call: Request[protocol.ProgressOf]) -> Message:
        whose = self._whose(call.head.member)
        staged = self._staged.names(lambda push: _is_of(push, whose))
        last = self._committed.get(whose)
        if last is None:
            return Message({"committed": None, "ack": None, "staged": staged})
        answer = {"committed": last.step, "ack": last.ack, "staged": staged}
        return Message({**answer, "commit": last} if self.own_steps else answer)

    def _whose(self, member: int | None) -> int | None:
        """The member whose step it is; None for a step of all members."""
        if self.own_steps and member is None:
            raise RefusedError(
                "expected the member that made the step, as in all elastic runs of mode async."
            )
        if not self.own_steps and member is not None:
            raise RefusedError(f"expected a step of all members, got one of member {member} alone.")
        return member


def _is_of(push: WholePush, member: int | None) -> bool:
    return member is None or push.member == member


# `OwnStepBatches`: mode async.
#
# A step of a member is one batch. Its gradients of rows (`push`) and of dense parameters (`stage_dense`) are
# staged at all servers; then the member sends the commit to all of them, and each applies its part at once.
# It says how many records are done (`ack`) and what to count. A member commits a step at a server only when
# all servers have committed the one before.
#
# If a member dies, its last step counts exactly when a server has committed it. Whoever finds that out fences
# the member, asks all servers for its progress, and sends the last commit to those that lack it, which have
# the parts. So servers never differ by more than one step of a member.
#
# Servers also add up what was committed by all members: the *tally*. Every answer to a commit has it, so that
# members know how far the job is without asking each other; and the number of the next *meeting* that a
# member has asked for, to which all of them come after the batch that they compute.


_MOST_STAGED = 64  # gradients of dense parameters of one member; more than a step has models


class OwnStepBatches(ElasticBatches):
    """The batches of one elastic run in mode async; dense: the models of the server."""

    own_steps = True

    def __init__(self, rows: RowUpdates, hello: protocol.ServerHello, dense: DenseService) -> None:
        super().__init__(rows, hello)
        if settings_of(hello).rejects:
            raise RefusedError(
                "expected an elastic run without grads_to_wait and tolerance, as a gradient that waits for "
                "others is lost with its trainer, got one of them."
            )
        self._dense = dense
        # By member and model: a member's gradients of a model's parameters, for one of its steps.
        self._staged_dense: dict[tuple[int, int], tuple[protocol.StageDense, Mapping[str, Tensor]]] = {}
        self._tally: dict[str, int] = {"batches": 0}
        self._meeting = 0
        self.endpoints.append(self._guarded(protocol.STAGE_DENSE, self._stage_dense))

    def _stage_dense(self, member: int, call: Request[protocol.StageDense]) -> Message:
        head = call.head
        step, number = head.step, head.model
        model = self._dense.model(number)
        self.members.trained.add(member)
        staged = self._staged_step(member, number)
        done = self._committed_step(member)
        if step > done and step != staged:
            if staged > done:
                raise RefusedError(f"expected gradients of step {staged}, got some of step {step}.")
            if sum(other == member for other, _ in self._staged_dense) >= _MOST_STAGED:
                raise RefusedError(f"expected up to {_MOST_STAGED} models in a step, got one more.")
            tensors = tensors_of(head.tensors, call.arrays)
            gradients = {name: dense_tensor(name, tensor, copy=True) for name, tensor in tensors.items()}
            try:
                model.expect(gradients)  # a commit must not fail
            except (ValueError, RuntimeError) as error:
                raise RefusedError(str(error)) from error
            self._staged_dense[member, number] = head, gradients
        return Message({"version": model.version})

    def _staged_step(self, member: int, model: int) -> int:
        """The step whose gradients of a model are staged; -1 if none are."""
        staged = self._staged_dense.get((member, model))
        return -1 if staged is None else staged[0].step

    @override
    def _commit(self, member: int, call: Request[protocol.Commit]) -> Message:
        whose = self._whose(call.head.member)
        if whose != member and whose not in self.members.fenced:
            raise RefusedError(
                f"expected a commit of member {member}'s own step, or of a member that is fenced off, got "
                f"member {whose}."
            )
        self.members.trained.add(member)
        super()._commit(member, call)
        return self._answer()

    @override
    def _check_dense(self, commit: protocol.Commit) -> None:
        assert commit.member is not None
        for number in commit.dense:
            if self._staged_step(commit.member, number) != commit.step:
                raise RefusedError(
                    f"expected gradients of model {number} that are staged for step {commit.step} of "
                    f"member {commit.member}, got none: they would be lost."
                )

    @override
    def _apply_dense(self, commit: protocol.Commit) -> None:
        member, step = commit.member, commit.step
        assert member is not None
        for number in commit.dense:
            head, gradients = self._staged_dense[member, number]
            answer = self._dense.model(number).push_gradients(
                gradients, head.version, trainer=_name(member), sequence=step, lr=head.lr
            )
            if not answer.accepted:
                raise RuntimeError(f"the gradients of model {number} are not accepted: {answer.reason}")
        self._forget_dense(member)
        self._tally["batches"] += 1
        for name, count in commit.counts.items():
            self._tally[name] = self._tally.get(name, 0) + count

    def _forget_dense(self, member: int) -> None:
        for name in [name for name in self._staged_dense if name[0] == member]:
            del self._staged_dense[name]

    @override
    def _abandon(self, member: int, call: Request[protocol.OfMember]) -> None:
        self._forget_dense(call.head.member)
        self._dense.forget(_name(call.head.member))
        super()._abandon(member, call)

    @override
    def _answer_tally(self, member: int, call: Request[protocol.Meeting]) -> Message:
        """The tally; a member may ask for the meeting of a number, which stays until that has been."""
        self._meeting = max(self._meeting, call.head.meeting)
        return self._answer()

    def _answer(self) -> Message:
        return Message({"tally": dict(self._tally), "meeting": self._meeting})


def _name(member: int) -> str:
    """The name under which dense parameters know a member."""
    return f"member-{member}"
