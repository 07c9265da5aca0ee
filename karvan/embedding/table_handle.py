"""`TableHandle`: a table of an engine, to inspect and maintain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.argument_checks import listed
from karvan.display import html_table
from karvan.store import LookupContext, LookupPlan, LookupProgram, Rows, Store, TableSpec
from karvan.store.types import Gradients

if TYPE_CHECKING:
    import pyarrow as pa


# `EngineState`: the state that the tables of an engine share: its store, step and waiting gradients.


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
        self.trained: set[str] = set()  # the tables that have an optimizer
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
        gradients = self.gradients(names)
        for pending in self._pending:
            pending.waiting -= names
        self._pending = [p for p in self._pending if p.waiting]
        return gradients

    def gradients(self, tables: Iterable[str]) -> list[tuple[LookupPlan, Gradients]]:
        """The backward passes whose gradients wait for these tables, oldest first; they stay."""
        names = set(tables)
        return [(p.plan, p.gradients) for p in self._pending if p.waiting & names]


class TableHandle:
    """One table of an engine, to read or change its rows; `engine.table("user")` returns it.

    Args:
        state: The engine's state.
        spec: The table as the store knows it.
        slot: Its number in the store.
        clock: What gives the time.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> table = engine.table("user")
        >>> table.rows, sorted(table.keys().tolist())
        (2, [7, 8])
        >>> table.vectors([7, 99]).shape
        torch.Size([2, 4])
    """

    def __init__(self, state: EngineState, spec: TableSpec, slot: int, clock: Callable[[], float]) -> None:
        self.engine_state = state
        self.spec = spec
        self.name = spec.name
        self.slot = slot  # its index among the engine's tables
        self.dim = spec.dim
        self._stored = state.store.table(spec.name)
        self._clock = clock
        self._optimizer: str | None = None
        self.initial_state: tuple[float, ...] = ()  # the optimizer state of a new row
        # Represents the table in an optimizer's param_groups; it has no elements.
        self.anchor = torch.zeros(0, requires_grad=True)

    @property
    def store(self) -> Store:
        """Where the rows are."""
        return self.engine_state.store

    @property
    def rows(self) -> int:
        """The number of keys that have a row."""
        return self.stats()["rows"]

    @property
    def bytes(self) -> int:
        """The memory of rows and index."""
        return self.stats()["bytes"]

    @property
    def version(self) -> int:
        """A number that grows with every change."""
        return self._stored.version

    def stats(self) -> dict[str, int]:
        """Return counters of the table.

        Returns:
            rows, bytes, inserted, evicted, rejected, dropped_gradients, skipped_updates and moved. `moved`
            counts index entries that growth has moved; while it rises, the index is growing.
        """
        return self._stored.stats()

    def keys(self) -> Tensor:
        """Return all keys, in the order of their hashes.

        Returns:
            The keys, int64.
        """
        return torch.from_numpy(self.snapshot().keys)

    def vectors(self, keys: Tensor | Sequence[int]) -> Tensor:
        """Return the vectors of keys; nothing changes.

        Args:
            keys: The keys.

        Returns:
            float32, (n, dim); zeros where a key has no row.
        """
        unique, inverse = np.unique(self._as_keys(keys), return_inverse=True)
        counts = np.ones(len(unique), dtype=np.uint32)
        rows = self.store.lookup({self.name: (unique, counts)}, LookupContext(training=False))
        return torch.from_numpy(rows[self.name].vectors[inverse.reshape(-1)])

    def snapshot(self, part: int = 0, parts: int = 1) -> Rows:
        """Return the rows.

        Args:
            part: Which part of them, from 0.
            parts: How many equal ranges of key hashes there are.

        Returns:
            The rows.
        """
        return self._stored.snapshot(part, parts)

    def to_arrow(self, strings: Mapping[str, int] | None = None) -> pa.Table:
        """Return the rows as a pyarrow table, with `to_pandas()`.

        Args:
            strings: The ids of texts, such as `dict(zip(words, kv.ids.farm(words).tolist()))`. They add a
                column `string`, null for other keys.

        Returns:
            A table with the columns key, vector, count and last_step.
        """
        import pyarrow as pa

        rows = self.snapshot()
        vectors = np.ascontiguousarray(rows.vectors, np.float32).reshape(-1)
        columns: dict[str, Any] = {"key": rows.keys}
        if strings is not None:
            texts = _texts_of_keys(strings)
            columns["string"] = pa.array([texts.get(key) for key in rows.keys.tolist()], pa.string())
        columns["vector"] = pa.FixedSizeListArray.from_arrays(vectors, self.dim)
        return pa.table({**columns, "count": rows.counts, "last_step": rows.last_steps})

    def load(self, rows: Rows) -> None:
        """Insert or overwrite rows.

        Args:
            rows: The rows, as of `snapshot`.
        """
        self._stored.load(rows)
        self.engine_state.content.replace()

    def evict(self) -> int:
        """Apply the table's eviction policy now.

        Returns:
            How many rows were removed.
        """
        return self._stored.evict(step=self.engine_state.step, now=self._clock())

    def evict_keys(self, keys: Tensor | Sequence[int]) -> int:
        """Remove the rows of some keys.

        Args:
            keys: The keys.

        Returns:
            How many of them had a row.
        """
        return self._stored.erase(self._as_keys(keys))

    def evicted_since(self, version: int) -> Tensor:
        """Return the keys whose rows were removed since a version, to update a copy.

        Args:
            version: An earlier `version` of the table.

        Returns:
            The keys. Some may have rows again.
        """
        return torch.from_numpy(self._stored.evicted_since(version))

    def clear(self) -> None:
        """Remove all rows."""
        self._stored.clear()

    @property
    def optimizer(self) -> str | None:
        """The kind of the rows' optimizer state, see `set_optimizer`; None without an optimizer."""
        return self._optimizer

    def _as_keys(self, keys: Tensor | Sequence[int]) -> NDArray[np.int64]:
        tensor = torch.as_tensor(keys) if len(keys) else torch.empty(0, dtype=torch.int64)
        if tensor.dtype is not torch.int64 or tensor.dim() != 1:
            raise TypeError(
                f"Table '{self.name}': expected 1-D keys of torch.int64, got {tensor.dtype} "
                f"of shape {tuple(tensor.shape)}."
            )
        return tensor.cpu().numpy()

    def set_optimizer(self, kind: str, initial: Sequence[float]) -> None:
        """Allocate an optimizer's state.

        Rows keep the state of an optimizer of the same kind.

        Args:
            kind: The kind of the state.
            initial: What its elements are for a new row.
        """
        self._stored.set_state(initial, fresh=self._optimizer not in (None, kind))
        self._optimizer = kind
        self.engine_state.trained.add(self.name)
        self.initial_state = tuple(initial)

    def __repr__(self) -> str:
        return f"TableHandle('{self.name}', dim={self.dim}, rows={self.rows})"

    def _repr_html_(self) -> str:
        return html_table(f"Table '{self.name}', dim {self.dim}", (), self.stats().items())


def _texts_of_keys(strings: Mapping[str, int]) -> dict[int, str]:
    """The texts by their keys, which as signed or unsigned integers are the same."""
    example = "dict(zip(words, kv.ids.farm(words).tolist()))"
    if not isinstance(strings, Mapping):
        raise TypeError(f"strings expects ids by text, {example}, got {type(strings).__name__}.")
    for text, key in strings.items():
        if not isinstance(text, str | bytes) or not hasattr(key, "__index__"):
            raise TypeError(f"strings expects ids by text, {example}, got {key!r} for {text!r}.")
    return {(int(key) + 2**63) % 2**64 - 2**63: text for text, key in strings.items()}


def find_table(handles: Mapping[str, TableHandle], name: str) -> TableHandle:
    """An engine's table of that name."""
    if name not in handles:
        raise KeyError(f"No table '{name}' in this engine; it has: {listed(name, handles)}")
    return handles[name]
