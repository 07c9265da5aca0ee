"""`Batches`: the one path of a trainer's lookups and of the gradients that follow them.

    pull      a lookup, held until the trainer reports that it is done with it; repetitions get its answer
    push      the gradients of lookups; applied once, however often they are sent
    withdraw  batches that will not be trained: their lookups are undone

A run has two strategies. `RowUpdates` says how lookups and pushes change rows, and which trainers wait for
each other. A subclass says when a push is applied: in `FixedBatches` when all of its passes have arrived, in
`ElasticBatches` when the trainers commit its step.

Embedding workers ask on behalf of trainers, and one that replaces a dead worker repeats requests that may
have been done. So a call may come twice, at the same time, or late, when its trainer is done with the batch.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor
from typing_extensions import override

from karvan.cluster.parameter_server.checkpointing import Restored, UpdateCounts
from karvan.cluster.parameter_server.dense_parameters import AnswerWindow, DenseService, settings_of
from karvan.cluster.parameter_server.row_updates import HeldLookup, Pass, RowUpdates, WholePush, settle
from karvan.dense.steps import dense_tensor
from karvan.dense.wire_format import tensors_of
from karvan.errors import mark
from karvan.protocol import parameter_server as protocol
from karvan.store.messages import floats, from_wire, to_wire
from karvan.store.types import Keys, LookupContext
from karvan.wire import Endpoint, Message, RefusedError, Request
from karvan.wire.schema import Call, H, expect_array

T = TypeVar("T")

# `Members`: which trainers of a run a server has heard of, and whose calls it refuses.
#
#  fence      a member may be gone. Whatever still comes from it is refused, but what it has staged stays, so
#             that the others can find out how far it came, and commit its last step where it has not.
#  abandon    it is settled what a member has done: the server drops the rest
#
# A trainer that was only silent may wake at any moment. From the fence on it cannot commit anything that the
# others decide against meanwhile. And as soon as one of the others has entered a newer round than it knows
# of, it is not told who the members are, so it cannot take those who have joined meanwhile for gone.


class Members:
    """The members of one run, by number; numbers are never used again."""

    def __init__(self) -> None:
        self._trained: set[int] = set()
        self.fenced: set[int] = set()
        self._abandoned: set[int] = set()
        self._round = 0

    @property
    def present(self) -> list[int]:
        """Those that have trained with this server, or are fenced, and are not abandoned."""
        return sorted((self._trained | self.fenced) - self._abandoned)

    def expect(self, member: int) -> None:
        """A RefusedError if a member is fenced or abandoned."""
        if member in self._abandoned or member in self.fenced:
            how = "abandoned" if member in self._abandoned else "fenced off"
            raise _left_behind(f"expected a member of the run, got member {member}, {how} by the others.")

    def enter_round(self, number: int) -> None:
        """A member has entered a round; a RefusedError if others have entered a newer one."""
        if number < self._round:
            raise _left_behind(
                f"expected a member of round {self._round}, like the others, got one of round {number}."
            )
        self._round = number

    def note(self, member: int) -> None:
        """A member trains."""
        self._trained.add(member)

    def abandon(self, member: int) -> None:
        """Refuse them, and forget the member otherwise."""
        self._abandoned.add(member)
        self.fenced.discard(member)


def _left_behind(text: str) -> RefusedError:
    """Temporary: its process was out of reach, and another one may replace it."""
    return mark(RefusedError(text), True)


_REMEMBERED = 256  # numbers of pushes and lookups, besides those that staleness allows to be in flight


class SingleFlight:
    """A request for work that is in progress shares its result; finished work is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, Future[Any]] = {}

    def do(self, name: Hashable, work: Callable[[], T]) -> T:
        """Do the work, or wait for the thread that is doing it."""
        with self._lock:
            is_first = name not in self._open
            future: Future[T] = self._open.setdefault(name, Future())
        if is_first:
            try:
                settle(future, work)
            finally:
                with self._lock:
                    del self._open[name]
        return future.result()


class Batches(ABC):
    """The batches of one run of a job's trainers, whose first one has said hello."""

    def __init__(self, rows: RowUpdates, hello: protocol.ServerHello) -> None:
        self._rows = rows
        self.log = rows.log  # lookups in flight, if they may be made in advance; captures omit them
        self._agreed = _settings_of_run(hello)
        self._window = _REMEMBERED + 2 * hello.staleness
        self._lock = threading.RLock()
        self._single_flight = SingleFlight()
        self._lookups: dict[tuple[int, int, int], HeldLookup] = {}  # by trainer, store and batch
        self._over = AnswerWindow[tuple[int, int], bool](self._window)  # lookups that trainers are done with
        self._members = Members()
        self._ended = ""  # why no more calls are accepted
        self.restored: Restored | None = None  # if set, lookups made before this process started are lost
        self.updates = UpdateCounts(hello.run)  # that the tables contain
        self.keys = 0  # looked up so far
        self.pulls = 0
        self.pushes = 0  # applied
        self.endpoints: list[Endpoint[Any]] = [
            self._guarded(protocol.PULL, self._pull),
            self._guarded(protocol.PUSH, self._push),
            self._guarded(protocol.WITHDRAW, self._withdraw),
        ]

    def between_steps(self) -> AbstractContextManager[Any]:
        """Within it no step is applied: tables contain all of a step or nothing.

        By default nothing is needed for that, as a push changes the rows in one operation.
        """
        return nullcontext()

    @abstractmethod
    def count_used(self, store: int, used: Sequence[Sequence[int]]) -> None:
        """These lookups count in a capture, though they have no push: their batches had no gradient."""

    @abstractmethod
    def _apply_commit(self, commit: protocol.Commit) -> None:
        """Apply the step that a call carries, before the call itself."""

    @abstractmethod
    def _expects(self, member: int, head: protocol.PushHead) -> bool:
        """Whether the gradients of a push are still needed; a RefusedError if they do not fit the run."""

    @abstractmethod
    def _receive(self, member: int, head: protocol.PushHead, passes: Mapping[int, Pass]) -> None:
        """Apply or stage the passes of a push, which are given by their positions."""

    def _is_staged(self, lookup: HeldLookup) -> bool:
        """Whether a lookup waits for the commit of its gradients, even if the trainer is done with it."""
        return False

    def check_run(self, hello: protocol.ServerHello) -> None:
        """All trainers of a run must have the same settings; one that was abandoned cannot come back."""
        settings = _settings_of_run(hello)
        if settings != self._agreed:
            raise RefusedError(
                f"expected a run with {self._agreed}, as the first trainer said, got {settings}."
            )
        self.expect_caller(hello)

    def expect_caller(self, hello: protocol.ServerHello) -> None:
        """A RefusedError for any call of a member that the others have fenced off or abandoned."""
        self._members.expect(hello.trainer)

    def end(self, reason: str) -> None:
        """End the run; trainers that wait get the reason, and lookups in flight are undone."""
        self._ended = reason
        self._rows.end(reason)
        with self._lock:
            lookups = list(self._lookups.values())
            self._lookups.clear()
        self._rows.withdraw(lookups)

    def _guarded(
        self, call: Call[H, Any], method: Callable[[int, Request[H]], Message[Any] | None]
    ) -> Endpoint[Any]:
        def execute(request: Request[H]) -> Message[Any] | None:
            member = request.caller.hello.trainer
            with self.between_steps():
                if self._ended:
                    raise RuntimeError(self._ended)
                self._members.expect(member)
                return method(member, request)

        return Endpoint(call, execute)

    def _pull(self, member: int, call: Request[protocol.PullHead]) -> Message:
        """Look up what a trainer asks for."""
        head, keys = call.head, call.arrays[0]
        if head.commit is not None:
            self._apply_commit(head.commit)
        self._rows.tables.check_tables(head.tables)
        self._forget(member, head)
        if head.training:
            name = (member, head.store, head.batch)
            lookup = self._single_flight.do(name, lambda: self._held_lookup(name, head, keys))
            vectors = lookup.vectors
        else:
            context = LookupContext(False, head.step, head.now)
            vectors = self._rows.owner.lookup(head.tables, [head.counts], [keys], context).vectors
            self._count_pull(head)
        return Message({}, [to_wire(vectors, head.wire)])

    def _held_lookup(self, name: tuple[int, int, int], head: protocol.PullHead, keys: Keys) -> HeldLookup:
        """A lookup for training; one that is repeated gets the same answer."""
        with self._lock:
            self._members.note(name[0])
            lookup = self._lookups.get(name)
            if lookup is None:
                self._expect_open(*name)
        if lookup is not None:
            size = sum(head.counts)
            same = (lookup.head.tables, lookup.head.counts) == (head.tables, head.counts)
            if not same or not np.array_equal(lookup.keys[:size], keys[:size]):
                raise RefusedError("expected the same keys as in the batch's lookup, got others.")
            return lookup
        lookup = self._rows.look_up(name[0], head, keys)
        try:
            with self._lock:
                self._expect_open(*name)  # the trainer may have withdrawn it in the meantime
                self._lookups[name] = lookup
        except RefusedError:
            self._rows.withdraw([lookup])
            raise
        self._count_pull(head)
        return lookup

    def _expect_open(self, member: int, store: int, batch: int) -> None:
        """A RefusedError for a late request of a worker that was replaced."""
        if self._over.find((member, store), batch) or self._over.forgotten((member, store), batch):
            raise RefusedError(f"expected a batch that the trainer is not done with, got {batch}.")

    def _count_pull(self, head: protocol.PullHead) -> None:
        self.keys += sum(head.counts)
        self.pulls += 1

    def _push(self, member: int, call: Request[protocol.PushHead]) -> None:
        """Take a trainer's gradients."""
        head = call.head
        if head.commit is not None:
            self._apply_commit(head.commit)
        if self._expects(member, head):
            self._receive(member, head, self._passes_of(member, call))
        self._forget(member, head)

    def _passes_of(self, member: int, call: Request[protocol.PushHead]) -> dict[int, Pass]:
        """The passes in a call, by their positions in the push, each as large as its lookup was."""
        head = call.head
        passes: dict[int, Pass] = {}
        for position, array in zip(head.positions, call.arrays, strict=True):
            with self._lock:
                lookup = self._lookups.get((member, head.store, head.batches[position]))
            if lookup is None:
                raise RefusedError(f"expected gradients of batches that were looked up, got {head.batches}.")
            if unknown := [name for name in (*head.rules, *head.skipped) if name not in lookup.head.tables]:
                raise RefusedError(f"expected rules for tables that were looked up, got '{unknown[0]}'.")
            (size,) = floats([lookup.head.counts], lookup.dims)
            expect_array(array, f"gradients[{position}]", array.dtype.name, size)
            passes[position] = lookup, from_wire(array, head.wire)
        return passes

    def _withdraw(self, member: int, call: Request[protocol.Withdraw]) -> None:
        """A trainer will not train these batches: their lookups are undone."""
        self._rows.withdraw(self._take(member, call.head.store, call.head.batches))

    def _forget(self, member: int, head: protocol.Done) -> None:
        """A trainer is done with lookups: their batches are trained, unless they had no gradient at all."""
        self._rows.trained(self._take(member, head.store, head.done))

    def _take(self, member: int, store: int, batches: Iterable[int]) -> list[HeldLookup]:
        """Batches are over; returns their lookups, except those that a commit will need."""
        lookups = []
        with self._lock:
            for batch in batches:
                lookups.append(self._lookups.pop((member, store, batch), None))
                self._over.remember((member, store), batch, True)
        return [lookup for lookup in lookups if lookup is not None and not self._is_staged(lookup)]


class _Received(NamedTuple):
    """The passes of a push that have arrived, by position; they may come from several workers."""

    batches: list[int]
    passes: dict[int, Pass]


class FixedBatches(Batches):
    """The batches of a run with a fixed number of trainers, in which each push is applied as it arrives.

    The passes of a push may come from several workers; the last one to arrive applies it. Calls run at the
    same time, and those in a barrier wait for each other, so no lock is held through a call.
    """

    def __init__(self, rows: RowUpdates, hello: protocol.ServerHello) -> None:
        super().__init__(rows, hello)
        self._received: dict[tuple[int, int, int], _Received] = {}  # by trainer, store and push
        self._applied = AnswerWindow[tuple[int, int], bool](self._window)  # pushes
        self.endpoints.extend(Endpoint(call, _refuse_commits) for call in protocol.COMMIT_CALLS.values())

    @override
    def count_used(self, store: int, used: Sequence[Sequence[int]]) -> None:
        with self._lock:
            names = [(trainer, store, batch) for trainer, its in enumerate(used) for batch in its]
            lookups = [self._lookups[name] for name in names if name in self._lookups]
        self._rows.trained(lookups)

    @override
    def _apply_commit(self, commit: protocol.Commit) -> None:
        _refuse_commits()

    @override
    def _expects(self, member: int, head: protocol.PushHead) -> bool:
        if head.step is not None:
            _refuse_commits()
        lookups = [(member, head.store, batch) for batch in head.batches]
        if self.restored is not None and any(name not in self._lookups for name in lookups):
            return False  # of a lookup that is lost; see `UpdateCounts`
        return not self._was_applied(member, head)

    def _was_applied(self, member: int, head: protocol.PushHead) -> bool:
        who, sequence = (member, head.store), head.sequence
        with self._lock:
            if self._applied.forgotten(who, sequence):
                raise RefusedError(f"expected one of trainer {member}'s newest pushes, got {sequence}.")
            return self._applied.find(who, sequence) is not None

    @override
    def _receive(self, member: int, head: protocol.PushHead, passes: Mapping[int, Pass]) -> None:
        name = (member, head.store, head.sequence)
        with self._lock:
            push = self._received.setdefault(name, _Received(head.batches, {}))
            if head.batches != push.batches:
                raise RefusedError(f"expected passes of the batches {push.batches}, got {head.batches}.")
            expect_same_tables([*push.passes.values(), *passes.values()])
            push.passes.update(passes)
            in_order = [push.passes[position] for position in sorted(push.passes)]
        if len(in_order) == len(head.batches):
            whole = WholePush(member, head, in_order)
            self._single_flight.do(("push", *name), lambda: self._apply(whole))

    def _apply(self, push: WholePush) -> None:
        member, head = push.member, push.head
        if self._was_applied(member, head):
            return
        self._rows.apply([push])
        with self._lock:
            self._applied.remember((member, head.store), head.sequence, True)
            self._received.pop((member, head.store, head.sequence), None)
            self.updates.add(head.store, member)
            self.pushes += 1


def _refuse_commits(call: Request | None = None) -> Message:
    raise RefusedError("expected an elastic run, which commits steps, got one that applies each push.")


def expect_same_tables(passes: Sequence[Pass]) -> None:
    """A RefusedError unless the passes of a push looked up the same tables."""
    first = passes[0][0].head.tables
    if other := next((lookup.head.tables for lookup, _ in passes if lookup.head.tables != first), None):
        raise RefusedError(f"expected passes that looked up the same tables, got {first} and {other}.")


def _settings_of_run(hello: protocol.ServerHello) -> str:
    """What trainers of a run must agree on."""
    trainers = "members" if hello.elastic else f"{hello.trainers} trainers"
    return f"{trainers}, mode {hello.mode} and grad_reduce {hello.grad_reduce}"


# `ElasticBatches`: a parameter server's staged pushes and commits in an elastic run.
#
#     push      stages the gradients of lookups, as part of a step; nothing is applied
#     commit    applies exactly these pushes, in this order, drops all others up to this step
#     drop      the step did not happen: its pushes go, its lookups stay, and members push it again
#     fence     a member may be gone: whatever still comes from it is refused, its pushes stay
#     abandon   a member is gone: its pushes and lookups go
#     progress  the last committed step, what its commit said, and what is staged
#     members   those that have trained and are not abandoned; asked by members of the newest round alone
#
# Members push a step's gradients, exchange the dense ones, and agree whether the step happened. If it did,
# each of them sends the commit to each server, by itself or in the head of its next `pull` or `push`, which
# see the committed rows then. The first commit of a step applies it; the others change nothing.
#
# So a member may die at any moment. A step is committed only after all servers have staged its parts.
# Survivors fence the dead member, which may only be silent. If they find by `progress` that a server has
# committed a step, they send the commit to the other servers, which have the parts; if no server has, they
# commit or drop the step, as they agree. Then they abandon the dead member.
#
# In mode async every member has steps of its own, and its commits and drops name it: see `OwnStepBatches`.

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
            self._guarded(protocol.FENCE, lambda member, call: self._members.fenced.add(call.head.member)),
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
        self._members.note(member)
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
        self._members.enter_round(call.head.round)
        self._members.note(member)
        return Message({"members": self._members.present})

    def _answer_tally(self, member: int, call: Request[protocol.Meeting]) -> Message:
        raise RefusedError("expected an elastic run of mode async, got a request for a tally in another one.")

    def _abandon(self, member: int, call: Request[protocol.OfMember]) -> None:
        """A member is gone; it may be the caller itself, which leaves."""
        number = call.head.member
        self._members.abandon(number)
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
        self._members.note(member)
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
        if whose != member and whose not in self._members.fenced:
            raise RefusedError(
                f"expected a commit of member {member}'s own step, or of a member that is fenced off, got "
                f"member {whose}."
            )
        self._members.note(member)
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
