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
from typing_extensions import override

from karvan.cluster.parameter_server.checkpointing import Restored, UpdateCounts
from karvan.cluster.parameter_server.dense_parameters import AnswerWindow
from karvan.cluster.parameter_server.row_updates import HeldLookup, Pass, RowUpdates, WholePush, settle
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
        self.trained: set[int] = set()
        self.fenced: set[int] = set()
        self._abandoned: set[int] = set()
        self._round = 0

    @property
    def present(self) -> list[int]:
        """Those that have trained with this server, or are fenced, and are not abandoned."""
        return sorted((self.trained | self.fenced) - self._abandoned)

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
        self.members = Members()
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
        self.members.expect(hello.trainer)

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
                self.members.expect(member)
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
            self.members.trained.add(name[0])
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
