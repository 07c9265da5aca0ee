"""`EngineState`: the state that the tables of an engine share: its store, step and waiting gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from karvan.store import LookupPlan, LookupProgram, Store
from karvan.store.types import Gradients


class Content:
    """Identifies the content of an engine's rows, without reading them.

    `id` is random and stays the same while rows are trained. Rows that are loaded get a new one; the next
    state_dict that is loaded is assumed to belong to them.
    """

    def __init__(self) -> None:
        self.id = uuid4().hex
        self.replaced = False

    def replace(self) -> None:
        """Rows were loaded from a checkpoint or a snapshot."""
        self.id = uuid4().hex
        self.replaced = True

    def belong_to(self, content: str | None) -> None:
        """The rows are those of a state with this id, if it has one."""
        self.id = content or self.id
        self.replaced = False


@dataclass
class _Pending:
    """A backward pass whose gradients have not been applied to the tables in `waiting`."""

    plan: LookupPlan
    gradients: Gradients
    waiting: set[str]


class EngineState:
    """What an engine knows of its tables, for table handles, optimizers and checkpoints.

    It refers neither to the engine nor to the handles, which refer to it: without a reference cycle the rows
    are released together with the engine.
    """

    def __init__(self, store: Store, program: LookupProgram, tables: Sequence[str]) -> None:
        self.store = store
        self.program = program  # the features that train, in the store's terms
        self.tables = list(tables)  # those of the program first, in its order
        self.step = 0
        self.filled = False  # whether a checkpoint has filled the tables
        self.content = Content()
        self._pending: list[_Pending] = []

    def add_gradients(self, plan: LookupPlan, gradients: Gradients, tables: set[str]) -> None:
        """The gradients of a backward pass wait for the optimizers of these tables."""
        self._pending.append(_Pending(plan, gradients, tables))

    def take_gradients(self, tables: Iterable[str]) -> list[tuple[LookupPlan, Gradients]]:
        """Return the backward passes whose gradients wait for an optimizer of these tables, oldest first.

        A pass is released once the gradients of every table that has an optimizer have been taken.
        """
        names = set(tables)
        taken = self.gradients(names)
        for pending in self._pending:
            pending.waiting -= names
        self._pending = [p for p in self._pending if p.waiting]
        return taken

    def gradients(self, tables: Iterable[str]) -> list[tuple[LookupPlan, Gradients]]:
        """The backward passes whose gradients wait for these tables, oldest first; they stay."""
        names = set(tables)
        return [(p.plan, p.gradients) for p in self._pending if p.waiting & names]
