"""`ElasticBatches`: a parameter server's lookups, staged pushes and commits in an elastic run.

    pull      a lookup, held until the member is done with it
    push      stages the gradients of lookups, as part of a step; nothing is applied
    commit    applies exactly these pushes, in this order, drops all others up to this step
    drop      the step did not happen: its pushes go, its lookups stay, and members push it again
    fence     a member may be gone: whatever still comes from it is refused, its pushes stay
    abandon   a member is gone: its pushes and lookups go
    progress  the last committed step, what its commit said, and what is staged
    members   those that have trained and are not abandoned; asked by members of the newest round alone

Members push a step's gradients, exchange the dense ones, and agree whether the step happened. If it did,
each of them sends the commit to each server, by itself or in the head of its next `pull` or `push`, which see
the committed rows then. The first commit of a step applies it; the others change nothing.

So a member may die at any moment. A step is committed only after all servers have staged its parts. Survivors
fence the dead member, which may only be silent. If they find by `progress` that a server has committed a
step, they send the commit to the other servers, which have the parts; if no server has, they commit or drop
the step, as they agree. Then they abandon the dead member.

In mode async every member has steps of its own, and its commits and drops name it: see `own_steps.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from karvan.cluster.parameter_server.answer_window import AnswerWindow
from karvan.cluster.parameter_server.checkpointing import Restored, UpdateCounts
from karvan.cluster.parameter_server.row_updates import (
    HeldLookup,
    JointUpdates,
    RowUpdates,
    SingleUpdates,
    StagedPush,
    StagedPushes,
)
from karvan.cluster.parameter_server.server_tables import ServerTables
from karvan.cluster.parameter_server.training_requests import expect_same_keys, settings_of_run
from karvan.job.sync_modes import MODES
from karvan.native import _native
from karvan.outages import mark
from karvan.protocol import parameter_server as protocol
from karvan.store.messages import floats, from_wire, to_wire
from karvan.store.row_owner import Owner
from karvan.store.types import LookupContext, Vectors
from karvan.wire import Endpoint, Message, RefusedError, Request
from karvan.wire.schema import Call, H, expect_array

# `Members`: which trainers of an elastic run a server has heard of, and whose calls it refuses.
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
    def known(self) -> list[int]:
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

    def fence(self, member: int) -> None:
        """Refuse the calls of a member."""
        self.fenced.add(member)

    def abandon(self, member: int) -> None:
        """Refuse them, and forget the member otherwise."""
        self._abandoned.add(member)
        self.fenced.discard(member)


def _left_behind(text: str) -> RefusedError:
    """Temporary: its process was out of reach, and another one may replace it."""
    return mark(RefusedError(text), True)


_REMEMBERED = 256  # numbers of pushes and lookups, besides those that staleness allows to be in flight


class _Committed(NamedTuple):
    step: int
    commit: protocol.Commit


class ElasticBatches:
    """The batches of one elastic run. One lock guards all of it: native code runs one operation at a time."""

    own_steps = False  # whether each member has steps of its own

    def __init__(
        self, owner: Owner, tables: ServerTables, hello: protocol.ServerHello, *, counts_skips: bool = True
    ) -> None:
        mode = MODES[hello.mode]
        if hello.reload:
            raise RefusedError(
                "expected an elastic run with on_server_loss rollback, got reload: rows of a checkpoint lack "
                "steps that the members have committed."
            )
        self._owner = owner
        self._tables = tables
        self._agreed = settings_of_run(hello)
        make = JointUpdates if mode.joint_rows else SingleUpdates
        self._rows: RowUpdates = make(
            owner, tables, by_key=hello.grad_reduce == "key", counts_skips=counts_skips
        )
        window = _REMEMBERED + 2 * hello.staleness
        self._lock = threading.RLock()
        self._lookups: dict[tuple[int, int, int], HeldLookup] = {}  # by member, store and batch
        self._over: AnswerWindow[bool] = AnswerWindow(window)  # lookups that members are done with
        self._staged = StagedPushes(window)
        self._committed: dict[int | None, _Committed] = {}  # by member if each has steps of its own, or None
        self._members = Members()
        self.on_abandon: Callable[[int], None] = lambda member: None
        self._ended = ""  # why no more calls are accepted
        self.restored: Restored | None = None  # never: see on_server_loss above
        self.updates = UpdateCounts(hello.run)
        self.keys = 0  # looked up so far
        self.pulls = 0
        self.pushes = 0  # committed
        self.endpoints = [
            self._guarded(protocol.PULL, self._pull),
            self._guarded(protocol.PUSH, self._push),
            self._guarded(protocol.WITHDRAW, self._withdraw),
            self._guarded(protocol.COMMIT, self._commit),
            self._guarded(protocol.DROP, self._drop),
            self._guarded(protocol.FENCE, self._fence),
            self._guarded(protocol.ABANDON, self._abandon),
            self._guarded(protocol.PROGRESS, self._progress),
            self._guarded(protocol.MEMBERS_IN_ROUND, self._list_members),
            self._guarded(protocol.TALLY, self._answer_tally),
        ]

    @property
    def log(self) -> _native.LookupLog | None:
        """Lookups in flight, which captures omit."""
        return self._rows.log

    def check_run(self, hello: protocol.ServerHello) -> None:
        """All members of a run must have the same settings; one that was abandoned cannot come back."""
        settings = settings_of_run(hello)
        if settings != self._agreed:
            raise RefusedError(
                f"expected a run with {self._agreed}, as the first trainer said, got {settings}."
            )
        self.expect_caller(hello)

    def expect_caller(self, hello: protocol.ServerHello) -> None:
        """A RefusedError for any call of a member that the others have fenced off or abandoned."""
        self._members.expect(hello.trainer)

    def end(self, reason: str) -> None:
        """End the run: what is staged is dropped, lookups in flight are undone."""
        with self._lock:
            self._ended = reason
            self._release(self._staged.drop(lambda push: True), keep=())
            lookups, self._lookups = list(self._lookups.values()), {}
            self._rows.withdraw(lookups)

    def between_steps(self) -> AbstractContextManager[Any]:
        """Within it no step is applied: tables contain all of a step or nothing."""
        return self._lock

    def count_used(self, store: int, used: Sequence[Sequence[int]]) -> None:
        """In an elastic run, lookups without a push count when members are done with them."""
        if any(used):
            raise RefusedError("expected no used lookups in the capture of an elastic run, got some.")

    def _guarded(
        self, call: Call[H, Any], method: Callable[[int, Request[H]], Message[Any]]
    ) -> Endpoint[Any]:
        def execute(request: Request[H]) -> Message[Any]:
            member = request.caller.hello.trainer
            with self._lock:
                if self._ended:
                    raise RuntimeError(self._ended)
                self._members.expect(member)
                return method(member, request)

        return Endpoint(call, execute)

    def _pull(self, member: int, call: Request[protocol.PullHead]) -> Message:
        head, message = call.head, call.arrays[0]
        self._commit_first(head.commit)
        tables, counts = head.tables, head.counts
        self._tables.check_tables(tables)
        self._forget(member, head)
        if head.training:
            vectors = self._held_lookup(member, call).vectors
        else:
            context = LookupContext(False, head.step, head.now)
            vectors = self._owner.lookup(tables, [counts], [message], context).vectors
            self._count_pull(counts)
        return Message({}, [to_wire(vectors, head.wire)])

    def _held_lookup(self, member: int, call: Request[protocol.PullHead]) -> HeldLookup:
        """A lookup for training; one that is repeated gets the same answer."""
        head, message = call.head, call.arrays[0]
        tables, counts, batch = head.tables, head.counts, head.batch
        name, who = (member, head.store, batch), _who(member, head.store)
        self._members.note(member)
        known = self._lookups.get(name)
        if known is not None:
            expect_same_keys(known.tables, known.counts, known.keys, tables, counts, message)
            return known
        if self._over.find(who, batch) or self._over.forgotten(who, batch):
            raise RefusedError(f"expected a batch that the trainer is not done with, got {batch}.")
        made = self._rows.look_up(tables, counts, message, head.step, head.now)
        self._lookups[name] = made
        self._count_pull(counts)
        return made

    def _count_pull(self, counts: Sequence[int]) -> None:
        self.keys += sum(counts)
        self.pulls += 1

    def _push(self, member: int, call: Request[protocol.PushHead]) -> Message:
        head = call.head
        self._commit_first(head.commit)
        if head.step is None:
            raise RefusedError("expected the push of an elastic run to have a step, got none.")
        step, sequence, batches = head.step, head.sequence, head.batches
        if not self._staged.holds(member, sequence, step, batches):
            committed = self._committed_step(member if self.own_steps else None)
            if step <= committed:
                raise RefusedError(
                    f"expected a push of a step after {committed}, got step {step}: steps up to "
                    f"{committed} are committed without it."
                )
            self._members.note(member)
            self._staged.add(self._staged_push(member, step, call))
        self._forget(member, head)
        return Message({})

    def _committed_step(self, whose: int | None) -> int:
        """The last step that is committed; -1 before the first."""
        return self._committed[whose].step if whose in self._committed else -1

    def _staged_push(self, member: int, step: int, call: Request[protocol.PushHead]) -> StagedPush:
        head, batches = call.head, call.head.batches
        if list(head.positions) != list(range(len(batches))):
            raise RefusedError(
                f"expected all {len(batches)} passes of an elastic run's push at once and in order, got "
                f"{list(head.positions)}."
            )
        lookups: list[HeldLookup] = []
        gradients: list[Vectors] = []
        for number, (batch, array) in enumerate(zip(batches, call.arrays, strict=True)):
            lookup = self._lookups.get((member, head.store, batch))
            if lookup is None:
                raise RefusedError(f"expected gradients of batches that were looked up, got {batches}.")
            if unknown := [name for name in (*head.rules, *head.skipped) if name not in lookup.tables]:
                raise RefusedError(f"expected rules for tables that were looked up, got '{unknown[0]}'.")
            if lookups and lookup.tables != lookups[0].tables:
                raise RefusedError(
                    f"expected passes that looked up the same tables, got {lookups[0].tables} and "
                    f"{lookup.tables}."
                )
            (size,) = floats([list(lookup.counts)], lookup.dims)
            expect_array(array, f"gradients[{number}]", array.dtype.name, size)
            lookups.append(lookup)
            gradients.append(from_wire(array, head.wire))
        self._tables.check_rules(head.rules)  # a commit must not fail
        return StagedPush(
            member=member,
            sequence=head.sequence,
            step=step,
            store=head.store,
            batches=batches,
            lookups=lookups,
            gradients=gradients,
            rules=head.rules,
            steps=head.steps,
            skipped=head.skipped,
            complete=head.complete,
        )

    def _commit_first(self, commit: protocol.Commit | None) -> None:
        """The commit that a call carries comes before the call itself."""
        if commit is not None:
            self._apply(commit)

    def _commit(self, member: int, call: Request[protocol.Commit]) -> Message:
        self._apply(call.head)
        return Message({})

    def _apply(self, commit: protocol.Commit) -> None:
        """Apply a step, unless it was applied; a RefusedError changes nothing."""
        whose, step = self._whose(commit.member), commit.step
        if step <= self._committed_step(whose):
            return
        parts = self._staged.find(commit.parts, step)
        if other := next((part for part in parts if not _is_of(part, whose)), None):
            raise RefusedError(f"expected parts of member {whose}, got one of member {other.member}.")
        self._rows.check(parts)
        self._find_more(commit)
        try:
            self._rows.apply(parts, commit.scale)
            self._apply_more(commit)
        except Exception as error:
            # Rows may have some of it. A repetition would apply that twice, so nothing more is accepted.
            self._ended = f"the commit of step {step} has failed: {error}"
            raise
        self._staged.commit(parts)
        self._committed[whose] = _Committed(step, commit)
        dropped = self._staged.drop(lambda push: push.step <= step and _is_of(push, whose))
        self._release(dropped, keep=self._lookups.values())
        for part in parts:
            self.updates.add(part.store, part.member)
        self.pushes += len(parts)

    def _find_more(self, commit: protocol.Commit) -> None:
        """A RefusedError if something that a commit names, other than pushes, is not staged."""
        if commit.dense or commit.counts:
            raise RefusedError(
                "expected dense parameters and counts in commits of mode async alone, got some."
            )

    def _apply_more(self, commit: protocol.Commit) -> None:
        """Apply what a commit has besides pushes: nothing, unless members have steps of their own."""

    def _drop(self, member: int, call: Request[protocol.Drop]) -> Message:
        whose, first = self._whose(call.head.member), call.head.step
        dropped = self._staged.drop(lambda push: push.step >= first and _is_of(push, whose))
        self._release(dropped, keep=self._lookups.values())
        return Message({})

    def _fence(self, member: int, call: Request[protocol.OfMember]) -> Message:
        self._members.fence(call.head.member)
        return Message({})

    def _list_members(self, member: int, call: Request[protocol.RoundNumber]) -> Message:
        """The caller trains from now on, so it is one of them."""
        self._members.enter_round(call.head.round)
        self._members.note(member)
        return Message({"members": self._members.known})

    def _answer_tally(self, member: int, call: Request[protocol.Meeting]) -> Message:
        raise RefusedError("expected an elastic run of mode async, got a request for a tally in another one.")

    def _abandon(self, member: int, call: Request[protocol.OfMember]) -> Message:
        """A member is gone; it may be the caller itself, which leaves."""
        gone = call.head.member
        self._members.abandon(gone)
        self.on_abandon(gone)
        dropped = self._staged.drop(lambda push: push.member == gone)
        mine = [name for name in self._lookups if name[0] == gone]
        lookups = {id(lookup): lookup for push in dropped for lookup in push.lookups}
        lookups |= {id(self._lookups[name]): self._lookups[name] for name in mine}
        for name in mine:
            del self._lookups[name]
        self._rows.withdraw(lookups.values())
        self._staged.forget(gone)
        self._committed.pop(gone, None)
        for store in {name[1] for name in mine}:
            self._over.forget(_who(gone, store))
        return Message({})

    def _progress(self, member: int, call: Request[protocol.ProgressOf]) -> Message:
        whose = self._whose(call.head.member)
        staged = self._staged.names(lambda push: _is_of(push, whose))
        last = self._committed.get(whose)
        if last is None:
            return Message({"committed": None, "ack": None, "staged": staged})
        answer = {"committed": last.step, "ack": last.commit.ack, "staged": staged}
        return Message({**answer, "commit": last.commit} if self.own_steps else answer)

    def _whose(self, member: int | None) -> int | None:
        """The member whose step it is; None for a step of all members."""
        if self.own_steps and member is None:
            raise RefusedError(
                "expected the member that made the step, as in all elastic runs of mode async."
            )
        if not self.own_steps and member is not None:
            raise RefusedError(f"expected a step of all members, got one of member {member} alone.")
        return member

    def _release(self, dropped: Iterable[StagedPush], keep: Iterable[HeldLookup]) -> None:
        """Undo the lookups of dropped pushes, except those that can still be pushed again."""
        kept = {id(lookup) for lookup in keep}
        lookups = {id(each): each for push in dropped for each in push.lookups if id(each) not in kept}
        self._rows.withdraw(each for each in lookups.values() if not self._staged.uses(each))

    def _withdraw(self, member: int, call: Request[protocol.Withdraw]) -> Message:
        """A member will not train these batches: their lookups are undone."""
        head = call.head
        lookups = self._take(member, head.store, head.batches)
        self._rows.withdraw(each for each in lookups if not self._staged.uses(each))
        return Message({})

    def _forget(self, member: int, head: protocol.Done) -> None:
        """A member is done with lookups; those in a staged push wait for its commit."""
        done = self._take(member, head.store, head.done)
        self._rows.trained(each for each in done if not self._staged.uses(each))

    def _take(self, member: int, store: int, batches: Iterable[int]) -> list[HeldLookup]:
        taken = []
        for batch in batches:
            lookup = self._lookups.pop((member, store, batch), None)
            self._over.remember(_who(member, store), batch, True)
            if lookup is not None:
                taken.append(lookup)
        return taken


def _who(member: int, store: int) -> str:
    """The name under which lookups are remembered: each store of a member has its own."""
    return f"{member} {store}"


def _is_of(push: StagedPush, member: int | None) -> bool:
    return member is None or push.member == member
