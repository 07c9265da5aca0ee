"""`RowUpdates`: how lookups and the pushes of a committed step change a server's rows; one way for each mode.

`JointUpdates`, for mode sync: lookups change nothing. A commit looks the keys of all parts
up again, together and in the order of the parts, this time inserting rows, counting uses and evicting; then
it adds their gradients up in this order and makes one update. So the tables depend on the committed parts and
their order alone, not on who looked them up, when, or how often, and are those of a run with a fixed number
of trainers. A lookup without a committed push leaves no trace.

`SingleUpdates`, for modes hybrid and async: a lookup inserts rows and counts uses when it arrives, and is in
the log of lookups in flight until its push is committed. Each part of a commit is an update of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan.cluster.parameter_server.answer_window import AnswerWindow
from karvan.cluster.parameter_server.server_tables import ServerTables
from karvan.native import _native, output_buffers
from karvan.store import TableSpec
from karvan.store.messages import floats, rule_from_json
from karvan.store.row_owner import Answered, Owner, Summed
from karvan.store.types import Keys, LookupContext, Vectors
from karvan.wire import RefusedError

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

    def __init__(self, owner: Owner, tables: ServerTables) -> None:
        self._owner = owner
        self._tables = tables
        self._scratch: dict[str, tuple[TableSpec, _native.Table]] = {}

    def read(self, tables: Sequence[str], counts: Sequence[int], message: Keys) -> Tensor:
        """The vectors of a message's keys, one table after the other."""
        answered = self._owner.lookup(tables, [list(counts)], [message], LookupContext(training=False))
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
        present = self._owner.present({table: each.keys for table, each in zeros.items()})
        for table, (keys, vectors, places) in zeros.items():
            absent = ~present[table]
            if absent.any():
                vectors[places[absent]] = self._initial(self._tables.spec(table), keys[absent])

    def _initial(self, spec: TableSpec, keys: Keys) -> Vectors:
        """What a table would insert for these keys; zeros for those that it would not admit."""
        if spec.admit[0] == "always" and spec.dtype == "float32":
            return spec.initial_vectors(keys)
        # As the native table itself admits and rounds: a table of the same name, emptied each time.
        known, table = self._scratch.get(spec.name, (None, None))
        if known != spec or table is None:
            table = _native.Table(
                spec.name, spec.dim, spec.dtype, spec.init, spec.seed, spec.admit, ("never", 0.0, 1), 1
            )
            self._scratch[spec.name] = spec, table
        unique, inverse = np.unique(keys, return_inverse=True)
        vectors, _ = table.lookup(unique, np.ones(len(unique), np.uint32), True, 0, 0.0)
        table.clear()
        made: Vectors = vectors[inverse]
        return made


# `StagedPushes`: the gradients that a server holds until the trainers commit or drop their step.
#
# A push is known by its member and sequence. It is staged once, however often it is sent; one that a step was
# committed with is remembered, so that a late repetition is answered as done and not staged again.


@dataclass(frozen=True, eq=False)
class HeldLookup:
    """A member's training lookup, held until the member is done with it.

    answered: the lookup in the tables, unless it has changed nothing in them.
    """

    tables: Sequence[str]
    counts: Sequence[int]
    dims: Sequence[int]
    keys: Keys  # and their uses: the message of the lookup
    step: int
    now: float
    vectors: Tensor
    answered: Answered | None = None


@dataclass(frozen=True, eq=False)
class StagedPush:
    """Gradients of some lookups, one for each backward pass, not multiplied by the step's scale."""

    member: int
    sequence: int
    step: int
    store: int
    batches: Sequence[int]
    lookups: Sequence[HeldLookup]
    gradients: Sequence[Vectors]
    rules: Mapping[str, Mapping[str, Any]]
    steps: Mapping[str, int]
    skipped: Sequence[str]
    complete: bool

    @property
    def name(self) -> tuple[int, int]:
        """How commits call it."""
        return self.member, self.sequence


class StagedPushes:
    """Staged pushes by member and sequence; a member has at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._staged: dict[tuple[int, int], StagedPush] = {}
        self._committed: AnswerWindow[bool] = AnswerWindow(most)

    def __len__(self) -> int:
        return len(self._staged)

    def holds(self, member: int, sequence: int, step: int, batches: Sequence[int]) -> bool:
        """Whether a push has been staged or committed before; a RefusedError if it must not be staged."""
        if self._committed.find(str(member), sequence):
            return True
        if (known := self._staged.get((member, sequence))) is not None:
            if (known.step, known.batches) != (step, batches):
                raise RefusedError(
                    f"expected push {sequence} of member {member} to be repeated as it was, of step "
                    f"{known.step} and batches {known.batches}, got step {step} and batches {batches}."
                )
            return True
        if self._committed.forgotten(str(member), sequence):
            raise RefusedError(f"expected one of member {member}'s newest pushes, got {sequence}.")
        staged = sum(other == member for other, _ in self._staged)
        if staged >= self._most:
            raise RefusedError(
                f"expected at most {self._most} staged pushes of a member, got one more of member {member}: "
                "commit or drop its steps first."
            )
        return False

    def add(self, push: StagedPush) -> None:
        """Stage a push that is not held yet."""
        self._staged[push.name] = push

    def find(self, names: Iterable[tuple[int, int]], step: int) -> list[StagedPush]:
        """These pushes, in this order; a RefusedError unless all are staged, and of the step."""
        found = []
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
            found.append(push)
        return found

    def commit(self, parts: Iterable[StagedPush]) -> None:
        """These have been applied."""
        for part in parts:
            del self._staged[part.name]
            self._committed.remember(str(part.member), part.sequence, True)

    def drop(self, chosen: Callable[[StagedPush], bool]) -> list[StagedPush]:
        """Remove and return the pushes for which `chosen` is true."""
        dropped = [push for push in self._staged.values() if chosen(push)]
        for push in dropped:
            del self._staged[push.name]
        return dropped

    def forget(self, member: int) -> None:
        """Forget the committed pushes of a member that will not come back."""
        self._committed.forget(str(member))

    def uses(self, lookup: HeldLookup) -> bool:
        """Whether a staged push has gradients of a lookup."""
        return any(lookup is each for push in self._staged.values() for each in push.lookups)

    def names(self, chosen: Callable[[StagedPush], bool]) -> list[tuple[int, int, int]]:
        """Step, member and sequence of staged pushes, sorted."""
        return sorted((push.step, *push.name) for push in self._staged.values() if chosen(push))


_Engine: TypeAlias = tuple[int, tuple[str, ...]]  # a store, and the tables of its lookups
_Joint: TypeAlias = tuple[list[HeldLookup], Answered]


class RowUpdates(ABC):
    """Lookups and updates of one run; for one thread at a time.

    by_key: divide a key's gradient by the number of parts that have it. counts_skips: whether this server
    counts the updates that trainers skip.
    """

    log: _native.LookupLog | None = None  # lookups in flight, which captures omit

    def __init__(self, owner: Owner, tables: ServerTables, *, by_key: bool, counts_skips: bool) -> None:
        self.owner = owner
        self.tables = tables
        self.by_key = by_key
        self.counts_skips = counts_skips

    @abstractmethod
    def look_up(
        self, tables: Sequence[str], counts: Sequence[int], keys: Keys, step: int, now: float
    ) -> HeldLookup:
        """A lookup for training."""

    @abstractmethod
    def check(self, parts: Sequence[StagedPush]) -> None:
        """A RefusedError if the parts cannot be applied as one step."""

    @abstractmethod
    def apply(self, parts: Sequence[StagedPush], scale: float) -> None:
        """Apply the gradients of a step, times scale."""

    @abstractmethod
    def trained(self, lookups: Iterable[HeldLookup]) -> None:
        """The batches of these lookups count as trained."""

    @abstractmethod
    def withdraw(self, lookups: Iterable[HeldLookup]) -> None:
        """The batches of these lookups will not be trained."""

    def skip(self, tables: Iterable[str]) -> None:
        """Count updates that trainers have skipped, because their gradients are not finite."""
        for table in tables if self.counts_skips else ():
            self.owner.store.table(table).skip()

    def update(
        self,
        passes: Sequence[tuple[Answered, Sequence[Vectors]]],
        rules: Mapping[str, Mapping[str, Any]],
        steps: Mapping[str, int],
        complete: bool,
    ) -> None:
        """One update with the sum of some backward passes, whose gradients are given by caller."""
        summed: list[tuple[Answered, Summed]] = [
            (answered, self.owner.reduce(answered, gradients, complete=complete, by_key=self.by_key))
            for answered, gradients in passes
        ]
        made = {table: rule_from_json(rule) for table, rule in rules.items()}
        self.owner.update(passes[0][0].tables, summed, made, steps)


class SingleUpdates(RowUpdates):
    """Each part by itself, in the order of the parts."""

    def __init__(self, owner: Owner, tables: ServerTables, *, by_key: bool, counts_skips: bool) -> None:
        super().__init__(owner, tables, by_key=by_key, counts_skips=counts_skips)
        self.log: _native.LookupLog = _native.LookupLog()

    @override
    def look_up(
        self, tables: Sequence[str], counts: Sequence[int], keys: Keys, step: int, now: float
    ) -> HeldLookup:
        context = LookupContext(True, step, now)
        answered = self.owner.lookup(tables, [list(counts)], [keys], context, self.log)
        return HeldLookup(tables, counts, answered.dims, keys, step, now, answered.vectors, answered)

    @override
    def check(self, parts: Sequence[StagedPush]) -> None:
        """There is nothing that parts have to agree on."""

    @override
    def apply(self, parts: Sequence[StagedPush], scale: float) -> None:
        """A table that one part skips is skipped by all of them."""
        skipped = {table for part in parts for table in part.skipped}
        for part in parts:
            rules = {table: rule for table, rule in part.rules.items() if table not in skipped}
            self.skip(table for table in (*part.rules, *part.skipped) if table in skipped)
            passes = [
                (_answered(lookup), [scaled(gradients, scale)])
                for lookup, gradients in zip(part.lookups, part.gradients, strict=True)
            ]
            self.update(passes, rules, {table: part.steps[table] for table in rules}, part.complete)
            self.trained(part.lookups)

    @override
    def trained(self, lookups: Iterable[HeldLookup]) -> None:
        for lookup in lookups:
            plan = _answered(lookup).plan.native
            if plan is not None:
                self.log.trained(plan)

    @override
    def withdraw(self, lookups: Iterable[HeldLookup]) -> None:
        plans = [_answered(lookup).plan.native for lookup in lookups]
        if plans:
            self.log.withdraw([plan for plan in plans if plan is not None])


class JointUpdates(RowUpdates):
    """All parts together: one lookup for each backward pass, and one update for each optimizer."""

    def __init__(self, owner: Owner, tables: ServerTables, *, by_key: bool, counts_skips: bool) -> None:
        super().__init__(owner, tables, by_key=by_key, counts_skips=counts_skips)
        self._reads = TableReads(owner, tables)

    @override
    def look_up(
        self, tables: Sequence[str], counts: Sequence[int], keys: Keys, step: int, now: float
    ) -> HeldLookup:
        """The keys are kept for the commit."""
        vectors = self._reads.read(tables, counts, keys)
        dims = [self.owner.store.table(table).spec.dim for table in tables]
        return HeldLookup(tables, counts, dims, keys, step, now, vectors)

    @override
    def check(self, parts: Sequence[StagedPush]) -> None:
        """Parts have the same rules and steps, and each its own lookups."""
        known: dict[tuple[_Engine, str], tuple[StagedPush, Any]] = {}
        pushed: dict[tuple[int, str], StagedPush] = {}
        for part in parts:
            for lookup in part.lookups:
                for table in (*part.rules, *part.skipped):
                    if (first := pushed.setdefault((id(lookup), table), part)) is not part:
                        raise RefusedError(
                            f"expected the gradients of a lookup for table '{table}' once in step "
                            f"{part.step}, got pushes {first.sequence} and {part.sequence} of member "
                            f"{part.member}."
                        )
            for table, rule in part.rules.items():
                given = (rule, part.steps[table])
                first, expected = known.setdefault((_engine_of(part), table), (part, given))
                if given != expected:
                    raise RefusedError(
                        f"expected all parts of step {part.step} to have one rule and step for table "
                        f"'{table}', got step {expected[1]} of member {first.member} and step {given[1]} of "
                        f"member {part.member}, or other settings of their optimizers."
                    )

    @override
    def apply(self, parts: Sequence[StagedPush], scale: float) -> None:
        engines: dict[_Engine, list[StagedPush]] = {}
        for part in parts:
            engines.setdefault(_engine_of(part), []).append(part)
        joint: dict[_Engine, list[_Joint]] = {engine: [] for engine in engines}
        for number in range(max((len(part.lookups) for part in parts), default=0)):
            for engine, its_parts in engines.items():
                if lookups := _lookups_of_pass(its_parts, number):
                    joint[engine].append((lookups, self._insert(engine[1], lookups)))
        for engine, its_parts in engines.items():
            for together in _by_shared_tables(its_parts):
                self._update_jointly(together, joint[engine], scale)

    @override
    def trained(self, lookups: Iterable[HeldLookup]) -> None:
        """They count at the commit of their pushes."""

    @override
    def withdraw(self, lookups: Iterable[HeldLookup]) -> None:
        """They have changed nothing."""

    def _insert(self, tables: Sequence[str], lookups: Sequence[HeldLookup]) -> Answered:
        return self.owner.lookup(
            tables,
            [list(lookup.counts) for lookup in lookups],
            [lookup.keys for lookup in lookups],
            LookupContext(
                True, max(lookup.step for lookup in lookups), max(lookup.now for lookup in lookups)
            ),
        )

    def _update_jointly(self, parts: Sequence[StagedPush], joint: Sequence[_Joint], scale: float) -> None:
        """One update with the gradients of pushes that have tables in common."""
        skipped = {table for part in parts for table in part.skipped}
        rules = {table: rule for part in parts for table, rule in part.rules.items() if table not in skipped}
        steps = {table: step for part in parts for table, step in part.steps.items() if table not in skipped}
        self.skip(sorted(skipped))
        complete = all(part.complete for part in parts)
        passes = []
        for number, (lookups, answered) in enumerate(joint):
            pushed = {
                id(part.lookups[number]): part.gradients[number]
                for part in parts
                if number < len(part.lookups)
            }
            sizes = floats(answered.asked, answered.dims)
            gradients = [
                scaled(pushed[id(lookup)], scale) if id(lookup) in pushed else np.full(size, np.nan, "f4")
                for lookup, size in zip(lookups, sizes, strict=True)
            ]
            complete = complete and len(pushed) == len(lookups)
            passes.append((answered, gradients))
        self.update(passes, rules, steps, complete)


def scaled(gradients: Vectors, scale: float) -> Vectors:
    """Gradients times scale, in float32, as a trainer would send them."""
    if scale == 1.0:
        return gradients
    made: Vectors = output_buffers.empty(len(gradients)).numpy()
    return np.multiply(gradients, np.float32(scale), out=made)


def _engine_of(part: StagedPush) -> _Engine:
    return part.store, tuple(part.lookups[0].tables)


def _lookups_of_pass(parts: Sequence[StagedPush], number: int) -> list[HeldLookup]:
    """The lookups of a backward pass, in the order of the parts; two optimizers share those of an engine."""
    found: dict[int, HeldLookup] = {}
    for part in parts:
        if number < len(part.lookups):
            found.setdefault(id(part.lookups[number]), part.lookups[number])
    return list(found.values())


def _by_shared_tables(parts: Sequence[StagedPush]) -> list[list[StagedPush]]:
    """The pushes of each optimizer: those that have a table in common, directly or through others."""
    groups: list[tuple[set[str], list[StagedPush]]] = []
    for part in parts:
        tables, members = {*part.rules, *part.skipped}, [part]
        for group in [each for each in groups if each[0] & tables]:
            groups.remove(group)
            tables |= group[0]
            members = group[1] + members
        groups.append((tables, members))
    order = {id(part): number for number, part in enumerate(parts)}
    return [sorted(members, key=lambda part: order[id(part)]) for _, members in groups]


def _answered(lookup: HeldLookup) -> Answered:
    assert lookup.answered is not None
    return lookup.answered
