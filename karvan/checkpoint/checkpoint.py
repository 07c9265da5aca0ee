"""`Checkpoint`: one checkpoint on disk, to verify, inspect and load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from torch import Tensor

from karvan import distributed
from karvan.checkpoint import manifest as manifests
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError, quoted, together
from karvan.checkpoint.manifest import WHOLE, Manifest, PartEntry, Range, TableEntry, share_of
from karvan.checkpoint.safetensors_file import Damage, FileEntry, damage_of, read_arrays
from karvan.checkpoint.state_tree import as_tensor, decode
from karvan.checkpoint.table_files import (
    Extra,
    Layer,
    Model,
    TableReader,
    check_part,
    engine_entries,
    read_extras,
    tables_of,
)
from karvan.embedding import TableHandle
from karvan.job.checkpoint_url import address_of, local_path
from karvan.store import Rows, SharedStore, StoredTable
from karvan.threads import cores

# Transforms of data in a checkpoint: the statistics of a fitted `FeatureEngine`, by the engine's name.
#
# A transform is anything with `state_dict` and `load_state_dict`. In the state of a checkpoint they are
# `{"transforms": {name: state}}`. Beside them are the kinds of the data's columns,
# `{":columns": {name: [kind, file]}}`.

KEY = "transforms"
COLUMNS = ":columns"  # a name that no transform has


@runtime_checkable
class Transform(Protocol):
    """A transform that may have state."""

    def state_dict(self) -> dict[str, Any]:
        """Its statistics."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Replace its statistics."""


def name_of(transform: Transform) -> str:
    """The name under which its state is saved: its `name`, or that of its class."""
    name = getattr(transform, "name", None)
    return name if isinstance(name, str) and name else type(transform).__name__


def has_state(transform: object) -> TypeGuard[Transform]:
    """Whether there is something to save. An engine without fitted steps has an empty state."""
    if not isinstance(transform, Transform) or isinstance(transform, type):
        return False
    return any(not isinstance(part, Mapping) or part for part in transform.state_dict().values())


def load_transforms(path: str | os.PathLike[str], state: Mapping[str, Any], *transforms: Transform) -> None:
    """Load what the state of a checkpoint has under their names into transforms; all of them, or none."""
    saved = state.get(KEY, {})
    for transform in transforms:
        if name_of(transform) not in saved:
            raise CheckpointError.mismatch(
                path,
                f"the statistics of transform '{name_of(transform)}'",
                "statistics of " + (", ".join(f"'{name}'" for name in saved) or "no transform"),
            )
    for transform in transforms:
        try:
            transform.load_state_dict(saved[name_of(transform)])
        except (ValueError, RuntimeError) as error:
            name = name_of(transform)
            raise CheckpointError(path, f"its transform '{name}' is another: {error}") from error


TABLE_STEPS = "table_steps"  # in the state of a checkpoint: how many steps of the optimizer tables have made
ORIGIN = "origin"  # in the state of a checkpoint of another system: the system, and its name there
_OTHER_RUN = "The folder belongs to a run with another model or optimizer: train this one in another folder."


_NO_STATE = (KeyError, ValueError, TypeError, RecursionError)  # what `decode` raises for other trees


class Checkpoint:
    """One checkpoint, opened to read or load it.

    Its manifest is read and checked at once, its files when they are needed. A delta is loaded, checked and
    inspected together with all it builds on, so that it behaves like a full one. In a job of several ranks
    all of them call `require_intact` and `load`; each may call the rest by itself.

    Args:
        path: The checkpoint's folder, or a URL.
        manifest: Its manifest, if it has been read already.

    Raises:
        CheckpointError: There is no checkpoint.
        DamagedCheckpointError: The manifest is damaged.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> saved = kv.checkpoint.save("two", {"epoch": 3}, engine, step=100)
        >>> checkpoint = kv.checkpoint.Checkpoint("two")
        >>> checkpoint.step, checkpoint.kind, checkpoint.state()
        (100, 'full', {'epoch': 3})
        >>> sum(len(rows.keys) for rows in checkpoint.parts("user"))
        2
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.path = local_path(path)
        self.manifest = manifest or manifests.read(self.path)
        self.step = self.manifest.step

    @property
    def kind(self) -> str:
        """The kind: "full" or "delta"."""
        return self.manifest.kind

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The metrics it was saved with."""
        try:
            return dict(decode(self.manifest.metrics, {}))
        except _NO_STATE as error:
            raise DamagedCheckpointError.mismatch(self.path, "metrics by name", f"'{error}'") from error

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
                lost = isinstance(error, DamagedCheckpointError) or not manifests.is_taken(path)
                kind = DamagedCheckpointError if lost else CheckpointError
                raise kind(
                    above.path, f"expected its base of step {base.step}, got an error: {error}"
                ) from error
            received = (below.step, below.manifest.id, below.manifest.checksum)
            if received != (base.step, base.id, base.checksum) or below.step >= above.step:
                raise DamagedCheckpointError.mismatch(
                    above.path,
                    f"a base of step {base.step} with id {base.id} at {path}",
                    f"step {below.step} with id {below.manifest.id}",
                )
            chain.insert(0, below)
        return chain

    def verify(self, checked: Callable[[Path, int], None] | None = None) -> list[Damage]:
        """Read every file, and those of the checkpoints it builds on.

        Args:
            checked: Called with each file and its number of bytes, once it has been read.

        Returns:
            The damaged files.
        """
        return self._verify(
            [(checkpoint, file) for checkpoint in self.chain for file in checkpoint.manifest.files], checked
        )

    def _verify(
        self, files: list[tuple[Checkpoint, FileEntry]], checked: Callable[[Path, int], None] | None = None
    ) -> list[Damage]:
        damaged: dict[Path, Damage] = {}
        with ThreadPoolExecutor(min(4, cores())) as pool:
            problems = pool.map(lambda job: damage_of(job[0].path, job[1]), files)
            for (checkpoint, file), problem in zip(files, problems, strict=True):
                if problem:
                    damaged[problem.path] = problem
                if checked is not None:
                    checked(checkpoint.path / file.name, file.bytes)
        # A checksum may match although the header is that of another table.
        checked_files = {(checkpoint.path, file.name) for checkpoint, file in files}
        for checkpoint, table, part in self._parts():
            path = checkpoint.path / part.name
            if (checkpoint.path, part.name) in checked_files and path not in damaged:
                try:
                    check_part(checkpoint.path, table, part, checkpoint.kind == "delta")
                except CheckpointError as error:
                    unread = not isinstance(error, DamagedCheckpointError)
                    damaged[path] = Damage(path, error.problem.removesuffix("."), unread, error.temporary)
        return list(damaged.values())

    def require_intact(self) -> None:
        """Raise if any file is damaged.

        Ranks divide the files among them and raise the same error.

        Raises:
            DamagedCheckpointError: A file is missing or changed.
        """
        channel = distributed.current().here

        def check() -> None:
            damaged = self._verify(self._files_of(channel.rank, channel.world_size))
            if damaged:
                more = f" {len(damaged) - 1} more files are damaged." if len(damaged) > 1 else ""
                unread = [damage for damage in damaged if damage.unread]
                kind = CheckpointError if unread else DamagedCheckpointError
                first = (unread or damaged)[0]
                raise kind(first.path, f"{first.problem}.{more}", temporary=first.temporary)

        together(channel, self.path, check, name_rank=False)

    def _files_of(self, rank: int, world: int) -> list[tuple[Checkpoint, FileEntry]]:
        """The files that a rank checks: those it reads, and its part of the files that all read."""
        files: list[tuple[Checkpoint, FileEntry]] = []
        share = share_of(rank, world)
        for checkpoint in self.chain:
            if rank == 0:
                files.append((checkpoint, checkpoint.manifest.dense))
            for table in checkpoint.manifest.tables.values():
                ranges = zip(table.ranges, table.parts, strict=True)
                files += [(checkpoint, part) for range_, part in ranges if range_.overlaps(share)]
                files += [(checkpoint, extra) for extra in table.extras[rank::world] if extra]
        return files

    def _parts(self) -> Iterator[tuple[Checkpoint, TableEntry, PartEntry]]:
        for checkpoint in self.chain:
            for table in checkpoint.manifest.tables.values():
                for part in table.parts:
                    yield checkpoint, table, part

    def state(self) -> dict[str, Any]:
        """Read the tree of state.

        Returns:
            The state. Its tensors do not share memory with anything.

        Raises:
            DamagedCheckpointError: It is damaged.
        """
        path = self.path / self.manifest.dense.name
        arrays = read_arrays(self.path, self.manifest.dense)
        tensors: dict[str, Tensor] = {name: as_tensor(array) for name, array in arrays.items()}
        try:
            return dict(decode(self.manifest.state, tensors))
        except _NO_STATE as error:
            raise DamagedCheckpointError.mismatch(path, "all tensors of the state", f"'{error}'") from error

    def parts(self, table: str, share: Range = WHOLE) -> Iterator[Rows]:
        """Read all rows of a table, one range of key hashes after the other.

        Args:
            table: The name of the table.
            share: Only rows with hashes in this range; only the files that have some are read.

        Returns:
            An iterator of rows.

        Raises:
            CheckpointError: There is no such table.
        """
        return self._reader(table).parts(share)

    def row(self, table: str, key: int) -> Rows | None:
        """Read the row of one key.

        Args:
            table: The name of the table.
            key: The key.

        Returns:
            The row; None if it has none.
        """
        return self._reader(table).row(key)

    def load(self, model: Model) -> dict[str, Any]:
        """Replace the rows of the model's tables, and return the state.

        Everything is checked first: if anything is damaged or does not fit, the tables do not change.
        Optimizer state is loaded for tables with an optimizer of the same kind. The caller loads the state:
        `model.load_state_dict(state["model"])` and so on. Ranks that train together all call it.

        Args:
            model: The model.

        Returns:
            The state.

        Raises:
            DamagedCheckpointError: A file is damaged.
            CheckpointError: The checkpoint does not fit the model.
        """
        channel = distributed.current().here
        handles = tables_of(model)
        together(channel, self.path, lambda: self._check_tables(handles), name_rank=False)
        self.require_intact()
        state: dict[str, Any] = {}
        extras: dict[str, Extra] = {}

        def read() -> None:
            state.update(self.state())
            for name, handle in handles.items():
                if isinstance(handle.store, SharedStore):
                    continue
                files = self.manifest.tables[name].extras if self._same_extra(name, handle) else []
                extras[name] = read_extras(self.path, files, share_of(*handle.store.share))

        def fill() -> None:
            shared: dict[SharedStore, dict[str, Any]] = {}
            for name, handle in handles.items():
                store = handle.store
                if isinstance(store, SharedStore):
                    shared.setdefault(store, {})[name] = self._fill_options(name, handle)
                else:
                    table, share = store.table(name), share_of(*store.share)
                    fill_table(self, name, table, share, self._fill_options(name, handle))
                    if extra := extras.pop(name):
                        table.load_extra(extra)
            if channel.rank == 0:
                for store, tables in shared.items():
                    for path, problem in store.fill_tables(address_of(self.path), tables):
                        raise DamagedCheckpointError(path, problem)

        together(channel, self.path, read)
        together(channel, self.path, fill)
        for handle in handles.values():
            handle.engine_state.filled = True
            handle.engine_state.content.replace()
        if self.origin is not None:
            state["model"] = {**state.get("model", {}), **engine_entries(model, self.step)}
        return state

    @property
    def origin(self) -> str | None:
        """The system of whose checkpoint this is a copy; None if Karvan has trained it."""
        tree = self.manifest.state
        return str(tree[ORIGIN]["system"]) if isinstance(tree, dict) and ORIGIN in tree else None

    def load_transforms(self, *transforms: Transform) -> None:
        """Load the statistics that were saved under their names into transforms, such as FeatureEngines.

        Args:
            *transforms: The transforms.

        Raises:
            CheckpointError: The checkpoint has no statistics of that name.
        """
        load_transforms(self.path, self.state(), *transforms)

    def _same_extra(self, name: str, handle: TableHandle) -> bool:
        """Whether saved counters fit the table; those of another filter have no meaning in it."""
        entry, spec = self.manifest.tables[name], handle.spec
        return (*entry.admit[::2], entry.evict[0]) == (*spec.admit[::2], spec.evict[0])

    def _fill_options(self, name: str, handle: TableHandle) -> dict[str, Any]:
        """The options of `SharedStore.fill_tables` for a table."""
        return {
            "keep": self.manifest.tables[name].optimizer is not None and handle.optimizer is not None,
            "initial": list(handle.initial_state),
            "extra": self._same_extra(name, handle),
        }

    def _reader(self, table: str) -> TableReader:
        layers = []
        for checkpoint in self.chain:
            if (entry := checkpoint.manifest.tables.get(table)) is None:
                tables = ", ".join(checkpoint.manifest.tables) or "none"
                raise CheckpointError.mismatch(checkpoint.path, f"a table out of: {tables}", f"'{table}'")
            layers.append(Layer(checkpoint.path, entry, checkpoint.kind == "delta"))
        return TableReader(table, layers)

    def _check_tables(self, handles: dict[str, TableHandle]) -> None:
        saved = self.manifest.tables
        if saved.keys() != handles.keys():
            raise CheckpointError(
                self.path,
                f"expected the model's tables {quoted(handles)}, got {quoted(saved)}; "
                "warm_start loads some of them.",
            )
        for name, handle in handles.items():
            try:
                check_table(self.path, name, saved[name], handle, optimizer_state=True)
            except CheckpointError as error:
                raise CheckpointError(self.path, f"{error.problem} {_OTHER_RUN}") from None
            if saved[name].dtype != handle.spec.dtype:
                raise CheckpointError.mismatch(
                    self.path, f"table '{name}' of {handle.spec.dtype}", saved[name].dtype
                )


def check_table(
    path: Path, name: str, entry: TableEntry, handle: TableHandle, *, optimizer_state: bool
) -> None:
    """Raise if the rows of a saved table do not fit into a model's."""
    if entry.dim != handle.dim:
        raise CheckpointError.mismatch(
            path, f"table '{name}' of dim {handle.dim}, as the model has it", f"dim {entry.dim}"
        )
    if not optimizer_state or handle.optimizer is None or entry.optimizer is None:
        return
    expected = (handle.optimizer, len(handle.initial_state))
    if (entry.optimizer, entry.state) != expected:
        raise CheckpointError.mismatch(
            path,
            f"table '{name}' with {expected[1]} floats of {expected[0]} state",
            f"{entry.state} floats of {entry.optimizer} state",
        )


def fill_table(
    checkpoint: Checkpoint, name: str, table: StoredTable, share: Range, request: Mapping[str, Any]
) -> None:
    """Replace the rows of a table by a share of a checkpoint's; request: see `SharedStore.fill_tables`."""
    table.clear()
    for rows in checkpoint.parts(name, share):
        table.load(with_state(rows, request["initial"], bool(request["keep"])))


def with_state(rows: Rows, initial: Sequence[float], keep: bool) -> Rows:
    """Rows with their optimizer state, or with that of a new row."""
    if keep:
        return rows
    values = np.tile(np.array(initial, np.float32), (len(rows.keys), 1))
    return rows._replace(state=np.ascontiguousarray(values))
