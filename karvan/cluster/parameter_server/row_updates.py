"""`ServerTables`, the tables of a server; and `RowUpdates`, how lookups and pushes change their rows.

There is one way for each kind of run.

`SingleUpdates`, for modes hybrid and async, and for a run of one trainer: a lookup inserts rows and counts
uses when it arrives. If lookups may be made in advance, it is in the log of lookups in flight until its push
is applied, so that captures contain the use counts of trained batches only. Each push is an update by itself.

`BarrierUpdates`, for mode sync with a fixed number of trainers: lookups and gradients of all trainers are
done together, in rank order. The call that comes last does them, the others wait for it.

`JointUpdates`, for mode sync of an elastic run: lookups change nothing. A commit looks the keys of all parts
up again, together and in the order of the parts, this time inserting rows, counting uses and evicting; then
it adds their gradients up in this order and makes one update. So the tables depend on the committed parts and
their order alone, not on who looked them up, when, or how often, and are those of a run with a fixed number
of trainers. A lookup without a committed push leaves no trace.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.activity import TRAINERS, activity
from karvan.native import _native
from karvan.protocol import parameter_server as protocol
from karvan.store import LookupContext, MemoryStore, Push, Rows, TableSpec
from karvan.store.memory import MemoryTable
from karvan.store.messages import floats, rule_from_json, spec_from_json
from karvan.store.program import empty
from karvan.store.row_owner import Answered, Owner, Summed
from karvan.store.types import Keys, Rule, Vectors
from karvan.system_limits import available_memory
from karvan.wire import Endpoint, Message, RefusedError, Request
from karvan.wire.schema import Call, expect_array

# The tables of a parameter server, and the calls about them outside of training steps.
#
# Calls have been checked against their declarations (`karvan/protocol/parameter_server.py`). What depends on
# the tables is checked here, before native code sees an array: that a table exists, how long its vectors are,
# how much optimizer state a row can have.

_log = logging.getLogger("karvan.cluster")
R = TypeVar("R")
T = TypeVar("T", bound=protocol.OfTable)

_ROW_UNIT, _INDEX = 16, 30  # bytes to which a row is rounded up; bytes of a row in the index


class ServerTables:
    """The tables of server number `index` of `count`, which have up to `capacity` rows together."""

    def __init__(self, index: int, count: int, capacity: int | None = None) -> None:
        self.index = index
        self.count = count
        self._capacity = capacity
        self._row_bytes: dict[str, int] = {}
        self._warned = False
        self._adding = threading.Lock()
        self.store = MemoryStore(capacity=capacity)
        self.owner = Owner(self.store)
        self.specs: dict[str, TableSpec] = {}
        self._checked_kinds: dict[str, set[str]] = {}  # of rules that fit the state that rows have
        self.endpoints: list[Endpoint[Any]] = [
            Endpoint(protocol.ADD_TABLE, lambda call: self.add(call.head.spec)),
            Endpoint(
                protocol.SET_STATE,
                lambda call: self.set_state(call.head.table, call.head.initial, call.head.fresh),
            ),
            Endpoint(protocol.LOOKUP, self._lookup),
            Endpoint(protocol.APPLY, self._apply),
            self._about(protocol.SKIP, lambda table, call: table.skip()),
            self._about(
                protocol.EVICT,
                lambda table, call: {"rows": table.evict(step=call.head.step, now=call.head.now)},
            ),
            self._about(protocol.ERASE, lambda table, call: {"rows": table.erase(call.arrays[0])}),
            self._about(protocol.CLEAR, lambda table, call: table.clear()),
            self._about(protocol.VERSION, lambda table, call: {"version": table.version}),
            self._about(protocol.EVICTED_SINCE, lambda table, call: [table.evicted_since(call.head.version)]),
            self._about(
                protocol.SNAPSHOT, lambda table, call: list(table.snapshot(call.head.part, call.head.parts))
            ),
            self._about(protocol.LOAD, _load),
            Endpoint(protocol.STATS, self._stats),
        ]

    def spec(self, table: str) -> TableSpec:
        """The spec of a table; a RefusedError if there is none of that name."""
        spec = self.specs.get(table)
        if spec is None:
            names = ", ".join(sorted(self.specs)[:8]) or "none"
            raise RefusedError(f"expected one of the tables here ({names}), got '{table}'.")
        return spec

    def check_tables(self, tables: Sequence[str]) -> None:
        """All of them must exist."""
        for table in tables:
            self.spec(table)

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add the table of a spec, unless it exists."""
        spec = spec_from_json(fields).share(self.index, self.count)
        with self._adding:  # otherwise two calls could make two tables of one name, with different dims
            self.store.add_table(spec)
            self.specs[spec.name] = spec

    def check_state(self, table: str, initial: Sequence[float]) -> None:
        """An optimizer has no state, one number for a row, or one to three for each number of its vector."""
        dim = self.spec(table).dim
        sizes = sorted({0, 1, dim, 2 * dim, 3 * dim})
        if len(initial) not in sizes:
            raise RefusedError(
                f"expected {', '.join(map(str, sizes))} floats of optimizer state for table '{table}', "
                f"got {len(initial)}."
            )

    def check_rules(self, rules: Mapping[str, Mapping[str, Any]]) -> None:
        """A ValueError unless the rows of these tables have the state that their rules need."""
        for table, rule in rules.items():
            if rule["kind"] in self._checked_kinds.get(table, ()):
                continue
            none = np.empty(0, np.int64), np.empty((0, self.spec(table).dim), np.float32)
            version = self.store.table(table).version  # of now, so that no eviction is looked through
            nothing = Push(*none, version)
            self.store.apply({table: [nothing]}, {table: rule_from_json(rule)}, {table: 0})
            self._checked_kinds.setdefault(table, set()).add(rule["kind"])

    def set_state(self, table: str, initial: Sequence[float], fresh: bool) -> None:
        """Set the optimizer state that new rows of a table get."""
        self.check_state(table, initial)
        self.store.table(table).set_state(initial, fresh)
        self._checked_kinds.pop(table, None)
        self._forecast(table, len(initial))

    def _forecast(self, table: str, state: int) -> None:
        """Warn if the rows that limits allow do not fit into memory, before they are there."""
        spec = self.specs[table]
        vector = spec.dim * (4 if spec.dtype == "float32" else 2)
        self._row_bytes[table] = -(-(vector + 4 * state) // _ROW_UNIT) * _ROW_UNIT + _INDEX
        if self._capacity is None:
            limits = {name: self.specs[name].most_rows for name in self._row_bytes}
            rows = sum(most or 0 for most in limits.values())
            needed = sum((most or 0) * self._row_bytes[name] for name, most in limits.items())
        else:
            rows, needed = self._capacity, self._capacity * max(self._row_bytes.values())
        available = available_memory()
        if needed > available and not self._warned:
            self._warned = True
            sizes = (f"{size / 2**30:,.0f}" for size in (needed, available))
            _log.warning(
                "Server %d may have %s rows, which take %s GiB, but %s GiB of memory are available. Lower "
                "the capacity of parameter servers or tables, or have more servers on other machines.",
                *(self.index, f"{rows:,}", *sizes),
            )

    def _lookup(self, request: Request[protocol.Lookup]) -> Message:
        head, arrays = request.head, request.arrays
        tables = head.tables
        self.check_tables(tables)
        keys = {table: (arrays[2 * at], arrays[2 * at + 1]) for at, table in enumerate(tables)}
        rows = self.store.lookup(keys, LookupContext(head.training, head.step, head.now))
        return Message({}, [rows[table].vectors for table in tables])

    def _apply(self, request: Request[protocol.Apply]) -> None:
        head, arrays = request.head, iter(request.arrays)
        self.check_tables(list(head.numbers))
        pushes: dict[str, list[Push]] = {}
        for table, number in head.numbers.items():
            dim, version = self.spec(table).dim, self.store.table(table).version
            pushes[table] = []
            for _ in range(number):
                keys, gradients = next(arrays), next(arrays)
                expect_array(gradients, f"gradients of table '{table}'", "float32", len(keys), dim)
                pushes[table].append(Push(keys, gradients, version))
        rules = {table: rule_from_json(rule) for table, rule in head.rules.items()}
        self.store.apply(pushes, rules, head.steps)

    def _about(self, call: Call[T, Any], work: Callable[[MemoryTable, Request[T]], Any]) -> Endpoint[Any]:
        """The endpoint of a call about one table; work returns the head or the arrays of the answer."""

        def execute(request: Request[T]) -> Message:
            result = work(self.store.table(self.spec(request.head.table).name), request)
            return Message({}, result) if isinstance(result, list) else Message(result or {})

        return Endpoint(call, execute)

    def _stats(self, request: Request[protocol.OfTables]) -> Message:
        tables = request.head.tables
        self.check_tables(tables)
        return Message({"stats": {table: self.store.table(table).stats() for table in tables}})


_WAIT = 240.0  # seconds that trainers wait for each other, less than they wait for a server


def _load(table: MemoryTable, request: Request[protocol.OfTable]) -> None:
    rows = Rows(*request.arrays)
    expect_array(rows.vectors, f"vectors of table '{table.name}'", "float32", len(rows.keys), table.spec.dim)
    table.load(rows)  # which checks how much state a row has at that moment


# `TableReads`: training lookups that change nothing in the tables.
#
# A key without a row gets the vector that its row will start with, which depends on the key alone. Whether it
# will have a row can depend on how often the key is used, or on the step: with admission by a minimum count,
# or by chance at each step, a key without a row reads as zeros, until a commit has given it a row.


_BY_KEY = ("always", "probability")  # admissions that depend on the key alone


class _Zeros(NamedTuple):
    """Keys of a table that may have no row, as their vectors begin with 0; all vectors; their places."""

    keys: Keys
    vectors: Vectors
    places: NDArray[np.int64]


class TableReads:
    """Vectors for training, from the tables of a server; for one thread at a time."""

    def __init__(self, tables: ServerTables) -> None:
        self._tables = tables
        self._scratch: dict[str, tuple[TableSpec, _native.Table]] = {}

    def read(self, tables: Sequence[str], counts: Sequence[int], message: Keys) -> Tensor:
        """The vectors of a message's keys, one table after the other."""
        answered = self._tables.owner.lookup(tables, [list(counts)], [message], LookupContext(training=False))
        flat = answered.vectors.numpy()
        key = start = 0
        zeros: dict[str, _Zeros] = {}
        for table, count, dim in zip(tables, counts, answered.dims, strict=True):
            if self._tables.spec(table).admit[0] in _BY_KEY:
                vectors = flat[start : start + count * dim].reshape(count, dim)
                places = np.flatnonzero(vectors[:, 0] == 0)
                if len(places):
                    zeros[table] = _Zeros(message[key : key + count][places], vectors, places)
            key += count
            start += count * dim
        if zeros:
            self._fill(zeros)
        return answered.vectors

    def _fill(self, zeros: Mapping[str, _Zeros]) -> None:
        """Write initial vectors where keys have no row; lookups have left zeros there."""
        present = self._tables.owner.present({table: vectors.keys for table, vectors in zeros.items()})
        for table, (keys, vectors, places) in zeros.items():
            absent = ~present[table]
            if absent.any():
                vectors[places[absent]] = self._initial(self._tables.spec(table), keys[absent])

    def _initial(self, spec: TableSpec, keys: Keys) -> Vectors:
        """What a table would insert for these keys; zeros for those that it would not admit."""
        if spec.admit[0] == "always" and spec.dtype == "float32":
            return spec.initial_vectors(keys)
        # As the native table itself admits and rounds: a table of the same name, emptied each time.
        initial, table = self._scratch.get(spec.name, (None, None))
        if initial != spec or table is None:
            table = _native.Table(
                spec.name, spec.dim, spec.dtype, spec.init, spec.seed, spec.admit, ("never", 0.0, 1), 1
            )
            self._scratch[spec.name] = spec, table
        unique, inverse = np.unique(keys, return_inverse=True)
        vectors, _ = table.lookup(unique, np.ones(len(unique), np.uint32), True, 0, 0.0)
        table.clear()
        result: Vectors = vectors[inverse]
        return result


# What a trainer has looked up and pushed, until the server is done with it.


@dataclass(frozen=True, eq=False)
class HeldLookup:
    """A trainer's training lookup, held until the trainer is done with it.

    answered: the lookup in the tables, unless it has changed nothing in them.
    """

    head: protocol.PullHead
    dims: Sequence[int]
    keys: Keys  # and their uses: the message of the lookup
    vectors: Tensor
    answered: Answered | None = None


Pass: TypeAlias = tuple[HeldLookup, Vectors]  # a backward pass: the lookup, and a trainer's gradients


@dataclass(frozen=True, eq=False)
class WholePush:
    """The gradients of some lookups, one for each backward pass, not multiplied by a step's scale."""

    member: int
    head: protocol.PushHead
    passes: Sequence[Pass]

    @property
    def lookups(self) -> list[HeldLookup]:
        """Those of its passes."""
        return [lookup for lookup, _ in self.passes]

    @property
    def name(self) -> tuple[int, int]:
        """How commits call it."""
        return self.member, self.head.sequence

    @property
    def step(self) -> int:
        """The step that it is a part of, in an elastic run."""
        assert self.head.step is not None
        return self.head.step


_Engine: TypeAlias = tuple[int, tuple[str, ...]]  # a store, and the tables of its lookups
_Joint: TypeAlias = tuple[list[HeldLookup], Answered]


class RowUpdates(ABC):
    """Lookups and updates of one run.

    hello: says how gradients are reduced, and whether lookups are made in advance.
    """

    def __init__(self, tables: ServerTables, hello: protocol.ServerHello) -> None:
        self.tables = tables
        self.owner = tables.owner
        self.by_key = hello.grad_reduce == "key"
        # Lookups in flight, which captures omit.
        self.log = _native.LookupLog() if hello.elastic or hello.staleness > 1 else None

    @abstractmethod
    def look_up(self, member: int, head: protocol.PullHead, keys: Keys) -> HeldLookup:
        """A lookup for training."""

    @abstractmethod
    def apply(self, parts: Sequence[WholePush], scale: float = 1.0) -> None:
        """Apply the gradients of pushes, times scale."""

    def check(self, parts: Sequence[WholePush]) -> None:  # noqa: B027
        """A RefusedError if the parts cannot be applied as one step."""

    def end(self, reason: str) -> None:  # noqa: B027
        """Those who wait for other trainers get the reason."""

    def trained(self, lookups: Iterable[HeldLookup]) -> None:
        """The batches of these lookups count as trained."""
        for plan in _plans(lookups):
            if self.log is not None:
                self.log.trained(plan)

    def withdraw(self, lookups: Iterable[HeldLookup]) -> None:
        """The batches of these lookups will not be trained."""
        if self.log is not None and (plans := _plans(lookups)):
            self.log.withdraw(plans)

    def skip(self, tables: Iterable[str]) -> None:
        """Count updates that trainers have skipped, because their gradients are not finite; at one server."""
        for table in tables if self.tables.index == 0 else ():
            self.tables.store.table(table).skip()

    def update(
        self,
        passes: Sequence[tuple[Answered, Sequence[Vectors]]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
        complete: bool,
    ) -> None:
        """One update with the sum of some backward passes, whose gradients are given by caller."""
        summed: list[tuple[Answered, Summed]] = []
        for answered, gradients in passes:
            _check_sizes(answered, gradients)
            reduced = self.owner.reduce(answered, gradients, complete=complete, by_key=self.by_key)
            summed.append((answered, reduced))
        self.owner.update(passes[0][0].tables, summed, rules, steps)


class SingleUpdates(RowUpdates):
    """Each part by itself, in the order of the parts."""

    @override
    def look_up(self, member: int, head: protocol.PullHead, keys: Keys) -> HeldLookup:
        context = LookupContext(True, head.step, head.now)
        answered = self.owner.lookup(head.tables, [head.counts], [keys], context, self.log)
        return HeldLookup(head, answered.dims, keys, answered.vectors, answered)

    @override
    def apply(self, parts: Sequence[WholePush], scale: float = 1.0) -> None:
        """A table that one part skips is skipped by all of them."""
        skipped = {table for part in parts for table in part.head.skipped}
        for part in parts:
            head = part.head
            rules = _rules_of(part, skipped)
            self.skip(table for table in (*head.rules, *head.skipped) if table in skipped)
            passes = [(_answered(lookup), [scaled(gradients, scale)]) for lookup, gradients in part.passes]
            self.update(passes, rules, {table: head.steps[table] for table in rules}, head.complete)
            self.trained(part.lookups)


class TrainerBarrier:
    """Barriers by name; every trainer takes part in each of them once."""

    def __init__(self, trainers: int, timeout: float) -> None:
        self._trainers = trainers
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: dict[Hashable, tuple[dict[int, Any], Future[Any]]] = {}
        self._ended = ""

    def take_part(self, name: Hashable, trainer: int, value: Any, work: Callable[[list[Any]], R]) -> R:
        """The result of `work` on the values of all trainers, in their order; the last to arrive runs it."""
        future: Future[R]
        with self._lock:
            if self._ended:
                raise RuntimeError(self._ended)
            values, future = self._open.setdefault(name, ({}, Future()))
            values[trainer] = value
            if is_last := len(values) == self._trainers:
                del self._open[name]
        if is_last:
            settle(future, lambda: work([values[rank] for rank in range(self._trainers)]))
        else:
            with activity.waiting(TRAINERS):
                wait([future], self._timeout)
            if not future.done():
                missing = sorted(set(range(self._trainers)) - set(values))
                raise RuntimeError(
                    f"expected all {self._trainers} trainers within {self._timeout:.0f} s, "
                    f"got nothing from trainer {', '.join(map(str, missing))}."
                )
        return future.result()

    def end(self, reason: str) -> None:
        """No trainer will come any more; those who wait get the reason."""
        with self._lock:
            self._ended = reason
            waiting, self._open = list(self._open.values()), {}
        for _, future in waiting:
            future.set_exception(RuntimeError(reason))


def settle(future: Future[R], work: Callable[[], R]) -> None:
    """Do the work, and give its result or its error to all that wait for it."""
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


class BarrierUpdates(RowUpdates):
    """The lookups and gradients of a fixed number of trainers, in the order of ranks, once all have come."""

    def __init__(self, tables: ServerTables, hello: protocol.ServerHello) -> None:
        super().__init__(tables, hello)
        self._barrier = TrainerBarrier(hello.trainers, _WAIT)

    @override
    def look_up(self, member: int, head: protocol.PullHead, keys: Keys) -> HeldLookup:
        def look_up_jointly(calls: list[tuple[protocol.PullHead, Keys]]) -> Answered:
            if other := next((call.tables for call, _ in calls if call.tables != head.tables), None):
                raise RefusedError(
                    f"expected all trainers to look up the same tables, got {head.tables} and {other}."
                )
            counts, messages = [call.counts for call, _ in calls], [message for _, message in calls]
            context = LookupContext(True, head.step, head.now)
            return self.owner.lookup(head.tables, counts, messages, context, self.log)

        name = ("pull", head.store, head.batch)
        answered = self._barrier.take_part(name, member, (head, keys), look_up_jointly)
        sizes = floats(answered.asked, answered.dims)
        begin = sum(sizes[:member])
        vectors = answered.vectors[begin : begin + sizes[member]]
        return HeldLookup(head, answered.dims, keys, vectors, answered)

    @override
    def apply(self, parts: Sequence[WholePush], scale: float = 1.0) -> None:
        """Wait for the same push of the other trainers: there are no commits, so scale is 1."""
        (part,) = parts
        head, rules = part.head, _rules_of(part)

        def update_jointly(pushes: list[Sequence[Pass]]) -> None:
            self.skip(head.skipped)
            passes = [
                (_answered(lookup), [push[number][1] for push in pushes])
                for number, lookup in enumerate(part.lookups)
            ]
            self.update(passes, rules, head.steps, head.complete)

        name = ("push", head.store, *head.batches, *rules)
        self._barrier.take_part(name, part.member, part.passes, update_jointly)
        self.trained(part.lookups)

    @override
    def end(self, reason: str) -> None:
        self._barrier.end(reason)


class JointUpdates(RowUpdates):
    """All parts together: one lookup for each backward pass, and one update for each optimizer."""

    def __init__(self, tables: ServerTables, hello: protocol.ServerHello) -> None:
        super().__init__(tables, hello)
        self.log = None  # lookups change nothing
        self._reads = TableReads(tables)

    @override
    def look_up(self, member: int, head: protocol.PullHead, keys: Keys) -> HeldLookup:
        """The keys are kept for the commit."""
        vectors = self._reads.read(head.tables, head.counts, keys)
        dims = [self.owner.store.table(table).spec.dim for table in head.tables]
        return HeldLookup(head, dims, keys, vectors)

    @override
    def check(self, parts: Sequence[WholePush]) -> None:
        """Parts have the same rules and steps, and each its own lookups."""
        rules: dict[tuple[_Engine, str], tuple[WholePush, Any]] = {}
        pushed: dict[tuple[HeldLookup, str], WholePush] = {}
        for part in parts:
            for lookup in part.lookups:
                for table in (*part.head.rules, *part.head.skipped):
                    if (first := pushed.setdefault((lookup, table), part)) is not part:
                        raise RefusedError(
                            f"expected the gradients of a lookup for table '{table}' once in step "
                            f"{part.step}, got pushes {first.head.sequence} and {part.head.sequence} of "
                            f"member {part.member}."
                        )
            for table, rule in part.head.rules.items():
                setting = (rule, part.head.steps[table])
                first, expected = rules.setdefault((_engine_of(part), table), (part, setting))
                if setting != expected:
                    raise RefusedError(
                        f"expected all parts of step {part.step} to have one rule and step for table "
                        f"'{table}', got step {expected[1]} of member {first.member} and step "
                        f"{setting[1]} of member {part.member}, or other settings of their optimizers."
                    )

    @override
    def apply(self, parts: Sequence[WholePush], scale: float = 1.0) -> None:
        engines: dict[_Engine, list[WholePush]] = {}
        for part in parts:
            engines.setdefault(_engine_of(part), []).append(part)
        joint: dict[_Engine, list[_Joint]] = {engine: [] for engine in engines}
        for number in range(max((len(part.passes) for part in parts), default=0)):
            for engine, its_parts in engines.items():
                # In the order of the parts; two optimizers share those of an engine.
                shared = dict.fromkeys(
                    part.lookups[number] for part in its_parts if number < len(part.passes)
                )
                if lookups := list(shared):
                    joint[engine].append((lookups, self._insert(engine[1], lookups)))
        for engine, its_parts in engines.items():
            for together in _by_shared_tables(its_parts):
                self._update_jointly(together, joint[engine], scale)

    def _insert(self, tables: Sequence[str], lookups: Sequence[HeldLookup]) -> Answered:
        heads = [lookup.head for lookup in lookups]
        context = LookupContext(True, max(head.step for head in heads), max(head.now for head in heads))
        keys = [lookup.keys for lookup in lookups]
        return self.owner.lookup(tables, [head.counts for head in heads], keys, context)

    def _update_jointly(self, parts: Sequence[WholePush], joint: Sequence[_Joint], scale: float) -> None:
        """One update with the gradients of pushes that have tables in common."""
        skipped = {table for part in parts for table in part.head.skipped}
        rules = {table: rule for part in parts for table, rule in _rules_of(part, skipped).items()}
        steps = {
            table: step for part in parts for table, step in part.head.steps.items() if table not in skipped
        }
        self.skip(sorted(skipped))
        complete = all(part.head.complete for part in parts)
        passes = []
        for number, (lookups, answered) in enumerate(joint):
            pushed = dict(part.passes[number] for part in parts if number < len(part.passes))
            sizes = floats(answered.asked, answered.dims)
            gradients = [
                scaled(pushed[lookup], scale) if lookup in pushed else np.full(size, np.nan, "f4")
                for lookup, size in zip(lookups, sizes, strict=True)
            ]
            complete = complete and len(pushed) == len(lookups)
            passes.append((answered, gradients))
        self.update(passes, rules, steps, complete)


def scaled(gradients: Vectors, scale: float) -> Vectors:
    """Gradients times scale, in float32, as a trainer would send them."""
    if scale == 1.0:
        return gradients
    result: Vectors = empty(len(gradients)).numpy()
    return np.multiply(gradients, np.float32(scale), out=result)


def _engine_of(part: WholePush) -> _Engine:
    return part.head.store, tuple(part.lookups[0].head.tables)


def _by_shared_tables(parts: Sequence[WholePush]) -> list[list[WholePush]]:
    """The pushes of each optimizer: those that have a table in common, directly or through others."""
    groups: list[tuple[set[str], list[WholePush]]] = []
    for part in parts:
        tables, members = {*part.head.rules, *part.head.skipped}, [part]
        for group in [group_ for group_ in groups if group_[0] & tables]:
            groups.remove(group)
            tables |= group[0]
            members = group[1] + members
        groups.append((tables, members))
    order = {id(part): number for number, part in enumerate(parts)}
    return [sorted(members, key=lambda part: order[id(part)]) for _, members in groups]


def _rules_of(part: WholePush, skipped: Collection[str] = ()) -> dict[str, Rule]:
    return {table: rule_from_json(rule) for table, rule in part.head.rules.items() if table not in skipped}


def _answered(lookup: HeldLookup) -> Answered:
    assert lookup.answered is not None
    return lookup.answered


def _plans(lookups: Iterable[HeldLookup]) -> list[_native.Plan]:
    answers = [lookup.answered for lookup in lookups if lookup.answered is not None]
    return [answered.plan.native for answered in answers if answered.plan.native is not None]


def _check_sizes(answered: Answered, gradients: Sequence[Vectors]) -> None:
    """Check, right before native code reads them, that gradients are as large as the lookups were."""
    sizes = floats(answered.asked, answered.dims)
    for trainer, (array, size) in enumerate(zip(gradients, sizes, strict=True)):
        expect_array(array, f"gradients of trainer {trainer}", "float32", size)
