"""A parameter server's lookups and the gradients that follow them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np

from karvan.activity import TRAINERS, activity
from karvan.cluster.parameter_server.answer_window import AnswerWindow
from karvan.cluster.parameter_server.checkpointing import Restored, UpdateCounts
from karvan.cluster.parameter_server.server_tables import ServerTables
from karvan.job.sync_modes import MODES
from karvan.native import _native
from karvan.protocol import parameter_server as protocol
from karvan.store.messages import floats, from_wire, rule_from_json, to_wire
from karvan.store.row_owner import Answered, Owner, Summed
from karvan.store.types import Keys, LookupContext, Vectors
from karvan.wire import Endpoint, Message, RefusedError, Request
from karvan.wire.schema import expect_array

# Work that can be requested again while it is in progress, and is done once.


T = TypeVar("T")


class SingleFlight:
    """A request for work that is in progress shares its result; finished work is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, Future[Any]] = {}

    def do(self, name: Hashable, work: Callable[[], T]) -> T:
        """Do the work, or wait for the thread that is doing it."""
        with self._lock:
            found = self._open.get(name)
            is_first = found is None
            future: Future[T] = Future() if found is None else found
            self._open[name] = future
        if is_first:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
            finally:
                with self._lock:
                    del self._open[name]
        return future.result()


# A barrier of trainers: work that all of them request is done once, when all have asked.


class TrainerBarrier:
    """Barriers by name; every trainer takes part in each of them once."""

    def __init__(self, trainers: int, timeout: float) -> None:
        self._trainers = trainers
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: dict[Hashable, _Round] = {}
        self._ended = ""

    def take_part(self, name: Hashable, trainer: int, value: Any, work: Callable[[list[Any]], T]) -> T:
        """The result of `work` on the values of all trainers, in their order; the last to arrive runs it."""
        with self._lock:
            if self._ended:
                raise RuntimeError(self._ended)
            round_ = self._open.setdefault(name, _Round())
            round_.values[trainer] = value
            last = len(round_.values) == self._trainers
            if last:
                del self._open[name]
        if last:
            round_.do(lambda: work([round_.values[each] for each in range(self._trainers)]))
        elif not self._waited(round_):
            missing = sorted(set(range(self._trainers)) - set(round_.values))
            raise RuntimeError(
                f"expected all {self._trainers} trainers within {self._timeout:.0f} s, "
                f"got nothing from trainer {', '.join(map(str, missing))}."
            )
        result: T = round_.result()
        return result

    def _waited(self, round_: _Round) -> bool:
        with activity.waiting(TRAINERS):
            return round_.done.wait(self._timeout)

    def end(self, reason: str) -> None:
        """No trainer will come any more; those who wait get the reason."""
        with self._lock:
            self._ended = reason
            waiting, self._open = list(self._open.values()), {}
        for round_ in waiting:
            round_.fail(RuntimeError(reason))


class _Round:
    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.done = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def do(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except Exception as error:
            self._error = error
        self.done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.done.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


_WAIT = 240.0  # seconds that trainers wait for each other, less than they wait for a server
_REMEMBERED = 256  # numbers of pushes, besides those that staleness allows to be in flight


class _Asked(NamedTuple):
    tables: list[str]
    counts: list[int]
    keys: Keys


class _Part(NamedTuple):
    """One of the backward passes of a push: the lookup, and a trainer's gradients."""

    answered: Answered
    gradients: Vectors


class _Parts(NamedTuple):
    """The passes of a push that have arrived, by position; they may come from several workers."""

    batches: list[int]
    received: dict[int, _Part]

    def expect(self, batches: list[int], parts: Mapping[int, _Part]) -> None:
        """Check that more passes belong to the same push, and that all looked up the same tables."""
        if batches != self.batches:
            raise RefusedError(f"expected passes of the batches {self.batches}, got {batches}.")
        tables = [list(part.answered.tables) for part in (*self.received.values(), *parts.values())]
        if other := next((each for each in tables if each != tables[0]), None):
            raise RefusedError(
                f"expected passes that looked up the same tables, got {tables[0]} and {other}."
            )


class Batches:
    """The batches of one run of a job's trainers.

    A trainer's lookup is held until the trainer reports that it is done with it, or withdraws it because the
    batch will not be trained. Lookups made in advance are in a log until their batches are trained, so that
    captures contain the use counts of trained batches only. In a synchronous run lookups and gradients of all
    trainers are done together, in rank order; otherwise each as it arrives.

    Embedding workers ask on behalf of trainers, and one that replaces a dead worker repeats requests that may
    have been done. So a lookup that is held gets the same answer again, and a push, which has a number, is
    applied once. The passes of a push may come from several workers; the last one to arrive applies it.

    counts_skips: whether this server counts the updates that trainers skip.
    """

    def __init__(
        self, owner: Owner, tables: ServerTables, hello: protocol.ServerHello, *, counts_skips: bool = True
    ) -> None:
        self._owner = owner
        self._tables = tables
        self._agreed = settings_of_run(hello)
        self._counts_skips = counts_skips
        self._trainers = hello.trainers
        self._together = MODES[hello.mode].joint_rows and self._trainers > 1
        self._by_key = hello.grad_reduce == "key"
        self._barrier = TrainerBarrier(self._trainers, _WAIT)
        self._lock = threading.Lock()
        self._single_flight = SingleFlight()
        self._lookups: dict[tuple[int, int, int], Answered] = {}  # by trainer, store and batch
        self.restored: Restored | None = None  # if set, lookups made before this process started are lost
        self.updates = UpdateCounts(hello.run)  # that the tables contain
        # Lookups in flight, if they may be made in advance; captures skip them.
        self.log = _native.LookupLog() if hello.staleness > 1 else None
        self._parts: dict[tuple[int, int, int], _Parts] = {}  # by trainer, store and push
        window = _REMEMBERED + 2 * hello.staleness
        self._applied: AnswerWindow[bool] = AnswerWindow(window)  # pushes
        self._over: AnswerWindow[bool] = AnswerWindow(window)  # lookups that trainers are done with
        self.keys = 0  # looked up so far
        self.pulls = 0
        self.pushes = 0
        self.endpoints: list[Endpoint[Any]] = [
            Endpoint(protocol.PULL, self.pull),
            Endpoint(protocol.PUSH, self.push),
            Endpoint(protocol.WITHDRAW, self.withdraw),
            *(Endpoint(call, _refuse_commits) for call in protocol.COMMIT_CALLS.values()),
        ]

    def check_run(self, hello: protocol.ServerHello) -> None:
        """All trainers of a run must have the same settings."""
        settings = settings_of_run(hello)
        if settings != self._agreed:
            raise RefusedError(
                f"expected a run with {self._agreed}, as the first trainer said, got {settings}."
            )

    def expect_caller(self, hello: protocol.ServerHello) -> None:
        """Do-nothing: only in an elastic run do trainers go on without one of them."""

    def between_steps(self) -> AbstractContextManager[Any]:
        """Do-nothing: a push changes the rows in one operation."""
        return nullcontext()

    def end(self, reason: str) -> None:
        """End the run; trainers that wait get the reason."""
        self._barrier.end(reason)
        with self._lock:
            plans = [answered.plan.native for answered in self._lookups.values()]
            self._lookups.clear()
            self._parts.clear()
        self._withdraw(plans)

    def withdraw(self, call: Request[protocol.Withdraw]) -> Message:
        """A trainer will not train these batches: their lookups are undone."""
        head, trainer = call.head, call.caller.hello.trainer
        store, plans = head.store, []
        with self._lock:
            for batch in head.batches:
                answered = self._lookups.pop((trainer, store, batch), None)
                self._over.remember(_who(trainer, store), batch, True)
                if answered is not None:
                    plans.append(answered.plan.native)
        self._withdraw(plans)
        return Message({})

    def _withdraw(self, plans: Sequence[_native.Plan | None]) -> None:
        if self.log is not None and plans:
            self.log.withdraw([plan for plan in plans if plan is not None])

    def count_used(self, store: int, used: Sequence[Sequence[int]]) -> None:
        """These lookups count in a capture, though they have no push: their batches had no gradient."""
        for trainer, batches in enumerate(used):
            for batch in batches:
                with self._lock:
                    answered = self._lookups.get((trainer, store, batch))
                self._trained(answered)

    def _trained(self, answered: Answered | None) -> None:
        if self.log is not None and answered is not None and answered.plan.native is not None:
            self.log.trained(answered.plan.native)

    def pull(self, call: Request[protocol.PullHead]) -> Message:
        """Look up what a trainer asks for."""
        if call.head.commit is not None:
            _refuse_commits(call)
        head, trainer = call.head, call.caller.hello.trainer
        tables, counts, keys = head.tables, head.counts, call.arrays[0]
        self._tables.check_tables(tables)
        self._forget(trainer, head)
        context = LookupContext(head.training, head.step, head.now)
        together = self._together and context.training
        name = (trainer, head.store, head.batch)

        def work(asked: list[_Asked]) -> Answered:
            if other := next((one.tables for one in asked if one.tables != tables), None):
                raise RefusedError(
                    f"expected all trainers to look up the same tables, got {tables} and {other}."
                )
            return self._owner.lookup(
                tables,
                [one.counts for one in asked],
                [one.keys for one in asked],
                context,
                self.log if context.training else None,
            )

        def once() -> Answered:
            with self._lock:
                known = self._lookups.get(name)
                who = _who(*name[:2])
                over = self._over.find(who, name[2]) or self._over.forgotten(who, name[2])
            if known is None and over:  # a late request of a worker that was replaced
                raise RefusedError(f"expected a batch that the trainer is not done with, got {name[2]}.")
            if known is not None:
                rank = trainer if together else 0
                expect_same_keys(known.tables, known.asked[rank], known.received[rank], tables, counts, keys)
                return known
            own = _Asked(tables, counts, keys)
            if together:
                answered = self._barrier.take_part(("pull", *name[1:]), trainer, own, work)
            else:
                answered = work([own])
            with self._lock:
                late = self._over.find(who, name[2]) is not None
                if not late:
                    self._lookups[name] = answered
            if late:  # the trainer has withdrawn it in the meantime
                self._withdraw([answered.plan.native])
                raise RefusedError(f"expected a batch that the trainer is not done with, got {name[2]}.")
            self.keys += sum(counts)
            self.pulls += 1
            return answered

        if context.training:
            answered = self._single_flight.do(("pull", *name), once)
        else:
            answered = work([_Asked(tables, counts, keys)])
            self.keys += sum(counts)
            self.pulls += 1
        vectors = answered.vectors
        if together:
            sizes = floats(answered.asked, answered.dims)
            begin = sum(sizes[:trainer])
            vectors = vectors[begin : begin + sizes[trainer]]
        return Message({}, [to_wire(vectors, head.wire)])

    def push(self, call: Request[protocol.PushHead]) -> Message:
        """Apply a trainer's gradients."""
        if call.head.commit is not None or call.head.step is not None:
            _refuse_commits(call)
        head, trainer = call.head, call.caller.hello.trainer
        store, batches = head.store, head.batches
        name = (trainer, store, head.sequence)
        if self.restored is not None and any(
            (trainer, store, batch) not in self._lookups for batch in batches
        ):
            self._forget(trainer, head)  # and nothing is applied; see update_counts.py
            return Message({})
        if not self._was_applied(name):
            parts = self._take_parts(call, trainer, batches)
            with self._lock:
                push = self._parts.setdefault(name, _Parts(batches, {}))
                push.expect(batches, parts)
                push.received.update(parts)
                complete = len(push.received) == len(batches)
            if complete:
                self._single_flight.do(("push", *name), lambda: self._apply(name, head))
        self._forget(trainer, head)
        return Message({})

    def _was_applied(self, name: tuple[int, int, int]) -> bool:
        trainer, store, sequence = name
        who = _who(trainer, store)
        with self._lock:
            if self._applied.forgotten(who, sequence):
                raise RefusedError(f"expected one of trainer {trainer}'s newest pushes, got {sequence}.")
            return self._applied.find(who, sequence) is not None

    def _take_parts(
        self, call: Request[protocol.PushHead], trainer: int, batches: list[int]
    ) -> dict[int, _Part]:
        """The passes in a call, by their positions in the push, each as large as its lookup was."""
        head = call.head
        parts: dict[int, _Part] = {}
        for position, array in zip(head.positions, call.arrays, strict=True):
            with self._lock:
                lookup = self._lookups.get((trainer, head.store, batches[position]))
            if lookup is None:
                raise RefusedError(f"expected gradients of batches that were looked up, got {batches}.")
            if unknown := [name for name in (*head.rules, *head.skipped) if name not in lookup.tables]:
                raise RefusedError(f"expected rules for tables that were looked up, got '{unknown[0]}'.")
            size = floats(lookup.asked, lookup.dims)[trainer if self._together else 0]
            expect_array(array, f"gradients[{position}]", array.dtype.name, size)
            parts[position] = _Part(lookup, from_wire(array, head.wire))
        return parts

    def _apply(self, name: tuple[int, int, int], head: protocol.PushHead) -> None:
        if self._was_applied(name):
            return
        trainer, store, sequence = name
        rules = {table: rule_from_json(rule) for table, rule in head.rules.items()}
        with self._lock:
            received = self._parts[name].received
            passes = [received[position] for position in range(len(received))]

        def work(of_trainers: list[list[Vectors]]) -> None:
            for table in head.skipped if self._counts_skips else ():
                self._owner.store.table(table).skip()
            summed: list[tuple[Answered, Summed]] = []
            for number, part in enumerate(passes):
                listed = [each[number] for each in of_trainers]
                _check_sizes(part.answered, listed)
                one = self._owner.reduce(part.answered, listed, complete=head.complete, by_key=self._by_key)
                summed.append((part.answered, one))
            self._owner.update(passes[0].answered.tables, summed, rules, head.steps)

        gradients = [part.gradients for part in passes]
        if self._together:
            self._barrier.take_part(("push", store, *head.batches, *rules), trainer, gradients, work)
        else:
            work([gradients])
        for part in passes:
            self._trained(part.answered)
        with self._lock:
            self._applied.remember(_who(trainer, store), sequence, True)
            self._parts.pop(name, None)
            self.updates.add(store, trainer)
            self.pushes += 1

    def _forget(self, trainer: int, head: protocol.Done) -> None:
        store, forgotten = head.store, []
        with self._lock:
            for batch in head.done:
                forgotten.append(self._lookups.pop((trainer, store, batch), None))
                self._over.remember(_who(trainer, store), batch, True)
        for answered in forgotten:
            self._trained(answered)  # done means trained, unless it had no gradient at all


def _refuse_commits(call: Request) -> Message:
    raise RefusedError("expected an elastic run, which commits steps, got one that applies each push.")


def _who(trainer: int, store: int) -> str:
    """The name under which numbers are remembered: each store of a trainer has its own."""
    return f"{trainer} {store}"


def expect_same_keys(
    known_tables: Sequence[str],
    known_counts: Sequence[int],
    known_keys: Keys,
    tables: Sequence[str],
    counts: Sequence[int],
    keys: Keys,
) -> None:
    """A RefusedError unless a batch that is looked up again has the keys of its first lookup."""
    size = sum(counts)
    same = known_tables == tables and known_counts == counts
    if not same or not np.array_equal(known_keys[:size], keys[:size]):
        raise RefusedError("expected the same keys as in the batch's lookup, got others.")


def _check_sizes(answered: Answered, gradients: list[Vectors]) -> None:
    """Check, right before native code reads them, that gradients are as large as the lookups were."""
    for trainer, (array, size) in enumerate(
        zip(gradients, floats(answered.asked, answered.dims), strict=True)
    ):
        expect_array(array, f"gradients of trainer {trainer}", "float32", size)


def settings_of_run(hello: protocol.ServerHello) -> str:
    """What trainers of a run must agree on."""
    trainers = "members" if hello.elastic else f"{hello.trainers} trainers"
    return f"{trainers}, mode {hello.mode} and grad_reduce {hello.grad_reduce}"
