"""`Checkpoint`: one checkpoint on a disk, to be checked, looked into and loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from karvan.checkpoint import manifest as manifests
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.files import problem_of, read_arrays
from karvan.checkpoint.manifest import Manifest, TableEntry
from karvan.checkpoint.tables import (
    Model,
    check_part,
    join,
    overlay,
    parts_of,
    read_extra,
    read_part,
    select,
    tables_of,
)
from karvan.checkpoint.tree import as_tensor, decode
from karvan.embedding import TableHandle
from karvan.store import Rows
from karvan.store.owners import Keys, hashes_of
from karvan.threads import cores


class Damage(NamedTuple):
    """A file that is not as its checkpoint's manifest says."""

    path: Path
    problem: str


class Checkpoint:
    """One checkpoint; its manifest is read and checked when it is opened, its files when they are needed.

    A delta is what changed since the one before it. It is loaded, checked and looked into together with all
    it builds on, so that it behaves like a full one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.manifest: Manifest = manifests.read(self.path)
        self.step = self.manifest.step

    @property
    def kind(self) -> str:
        """full or delta."""
        return self.manifest.kind

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The metrics it was saved with."""
        return dict(decode(self.manifest.metrics, {}))

    @cached_property
    def chain(self) -> list[Checkpoint]:
        """The full checkpoint it builds on, then the deltas in order; the last is this one."""
        chain = [self]
        while (base := chain[0].manifest.base) is not None:
            path = self.path.parent / Path(base.folder).name
            above = chain[0]
            try:
                below = Checkpoint(path)
            except CheckpointError as error:
                raise CheckpointError(
                    above.path, f"expected its base of step {base.step}, got an error: {error}"
                ) from error
            received = (below.step, below.manifest.id, below.manifest.checksum)
            if received != (base.step, base.id, base.checksum) or below.step >= above.step:
                raise CheckpointError.mismatch(
                    above.path,
                    f"a base of step {base.step} with id {base.id} at {path}",
                    f"step {below.step} with id {below.manifest.id}",
                )
            chain.insert(0, below)
        return chain

    def verify(self, checked: Callable[[Path, int], None] | None = None) -> list[Damage]:
        """Read every file, and those of what it builds on; returns the damaged ones.

        checked is called with each file and its bytes, once it has been read.
        """
        files = [(one, file) for one in self.chain for file in one.manifest.files]
        with ThreadPoolExecutor(min(4, cores())) as pool:
            problems = pool.map(lambda job: problem_of(job[0].path, job[1]), files)
            damaged = {}
            for (one, file), problem in zip(files, problems, strict=True):
                if problem:
                    damaged[one.path / file.name] = problem
                if checked is not None:
                    checked(one.path / file.name, file.bytes)
        # A checksum may fit and the header may still be that of another table.
        for one in self.chain:
            for table in one.manifest.tables.values():
                for part in table.parts:
                    try:
                        check_part(one.path, table, part, one.kind == "delta")
                    except CheckpointError as error:
                        damaged.setdefault(one.path / part.name, error.problem)
        return [Damage(path, problem.removesuffix(".")) for path, problem in damaged.items()]

    def require_intact(self) -> None:
        """Raise if any file is damaged."""
        damaged = self.verify()
        if damaged:
            more = f" {len(damaged) - 1} more files are damaged." if len(damaged) > 1 else ""
            raise CheckpointError(damaged[0].path, f"{damaged[0].problem}.{more}")

    def state(self) -> dict[str, Any]:
        """The tree of state, with tensors in memory of their own."""
        path = self.path / self.manifest.dense.name
        tensors: dict[str, Tensor] = {name: as_tensor(array) for name, array in read_arrays(path).items()}
        try:
            return dict(decode(self.manifest.state, tensors))
        except (KeyError, ValueError) as error:
            raise CheckpointError.mismatch(path, "all tensors of the state", f"'{error}'") from error

    def parts(self, table: str) -> Iterator[Rows]:
        """All rows of a table, one range of key hashes after the other, in the order of hashes."""
        chain = [(one, self._entry(one, table)) for one in self.chain]
        (full, entry), deltas = chain[0], chain[1:]
        for one, its in deltas:
            if (its.dim, its.dtype, its.state) != (entry.dim, entry.dtype, entry.state):
                raise CheckpointError.mismatch(
                    one.path,
                    f"table '{table}' as in its base: dim {entry.dim}, {entry.dtype}, {entry.state} of state",
                    f"dim {its.dim}, {its.dtype}, {its.state} of state",
                )
        for number, part in enumerate(entry.parts):
            rows, _ = read_part(full.path, entry, part, delta=False)
            for one, its in deltas:
                rows = overlay(rows, *_range(one, its, number, len(entry.parts)))
            yield rows

    def row(self, table: str, key: int) -> Rows | None:
        """The row of one key; None if it has none."""
        keys = np.array([key & (2**64 - 1)], np.uint64).view(np.int64)
        for one in reversed(self.chain):
            entry = self._entry(one, table)
            part = entry.parts[int(parts_of(hashes_of(keys), len(entry.parts))[0])]
            problem = problem_of(one.path, part)
            if problem:
                raise CheckpointError(one.path / part.name, f"{problem}.")
            rows, erased = read_part(one.path, entry, part, delta=one.kind == "delta")
            if (found := rows.keys == keys).any():
                return select(rows, found)
            if (erased == keys).any():
                return None
        return None

    def load(self, model: Model) -> dict[str, Any]:
        """Fill the model's tables, which lose what they held, and return the state.

        Everything is checked first: if anything is damaged or does not fit, the tables stay as they are.
        Optimizer state comes along for tables that have an optimizer, which must be of the same kind. The
        state is the caller's to hand on: `model.load_state_dict(state["model"])` and so on.
        """
        handles = tables_of(model)
        self._check_tables(handles)
        self.require_intact()
        state = self.state()
        for name, handle in handles.items():
            store, entry = handle.engine.store, self.manifest.tables[name]
            extra = read_extra(self.path / entry.extra.name) if entry.extra else {}
            store.clear(name)
            for rows in self.parts(name):
                store.load(name, with_state_of(handle, rows, entry.optimizer is not None))
            # Counters of another filter would mean nothing.
            same = (entry.admit[0], entry.admit[2], entry.evict[0]) == (
                handle.spec.admit[0],
                handle.spec.admit[2],
                handle.spec.evict[0],
            )
            if extra and same:
                store.load_extra(name, extra)
        return state

    def _entry(self, one: Checkpoint, table: str) -> TableEntry:
        if table not in one.manifest.tables:
            known = ", ".join(one.manifest.tables) or "none"
            raise CheckpointError.mismatch(one.path, f"a table out of: {known}", f"'{table}'")
        return one.manifest.tables[table]

    def _check_tables(self, handles: dict[str, TableHandle]) -> None:
        saved = self.manifest.tables
        if saved.keys() != handles.keys():
            raise CheckpointError(
                self.path,
                f"expected the model's tables {_listed(handles)}, got {_listed(saved)}; "
                "warm_start loads some of them.",
            )
        for name, handle in handles.items():
            check_table(self.path, name, saved[name], handle, optimizer_state=True)
            if saved[name].dtype != handle.spec.dtype:
                raise CheckpointError.mismatch(
                    self.path, f"table '{name}' of {handle.spec.dtype}", saved[name].dtype
                )


def check_table(
    path: Path, name: str, entry: TableEntry, handle: TableHandle, *, optimizer_state: bool
) -> None:
    """Raise if the rows of a saved table do not fit into a model's."""
    if entry.dim != handle.dim:
        raise CheckpointError.mismatch(path, f"table '{name}' of dim {handle.dim}", f"dim {entry.dim}")
    if not optimizer_state or handle.optimizer is None or entry.optimizer is None:
        return
    wanted = (handle.optimizer, len(handle.initial_state))
    if (entry.optimizer, entry.state) != wanted:
        raise CheckpointError.mismatch(
            path,
            f"table '{name}' with {wanted[1]} floats of {wanted[0]} state",
            f"{entry.state} floats of {entry.optimizer} state",
        )


def with_state_of(handle: TableHandle, rows: Rows, keep: bool) -> Rows:
    """Rows with their optimizer state, or with a new row's; without any where the table has no optimizer."""
    if keep and handle.optimizer is not None:
        return rows
    initial = np.array(handle.initial_state, np.float32)
    return rows._replace(state=np.ascontiguousarray(np.tile(initial, (len(rows.keys), 1))))


def _listed(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"


def _range(one: Checkpoint, entry: TableEntry, number: int, parts: int) -> tuple[Keys, Rows]:
    """What a delta says of one range of hashes out of so many: keys that left, rows that changed."""
    mine = len(entry.parts)
    if mine >= parts:
        share = mine // parts
        pieces = [
            read_part(one.path, entry, part, delta=True)
            for part in entry.parts[number * share : (number + 1) * share]
        ]
        return np.concatenate([gone for _, gone in pieces]), join([rows for rows, _ in pieces])
    rows, gone = read_part(one.path, entry, entry.parts[number * mine // parts], delta=True)
    inside = parts_of(hashes_of(rows.keys), parts) == number
    return gone[parts_of(hashes_of(gone), parts) == number], select(rows, inside)
