"""Writes the contents of a foreign checkpoint as a checkpoint of Karvan, complete or not at all."""

from __future__ import annotations

import os
import pickle
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from karvan.checkpoint import manifest as manifests
from karvan.checkpoint.atomic_folder import HiddenFolder, new_folder
from karvan.checkpoint.checkpoint import ORIGIN, Checkpoint
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.manifest import Manifest, row_bytes
from karvan.checkpoint.safetensors_file import FileEntry, Throttle, Writers
from karvan.checkpoint.state_tree import encode
from karvan.checkpoint.table_files import DENSE, ShareSource, joined, put_table
from karvan.checkpoint.writer import explaining
from karvan.embedding import Table
from karvan.job.checkpoint_url import local_path, url_of
from karvan.store import Rows, TableSpec
from karvan.store.messages import hashes_of
from karvan.store.types import Capture, Counts, Keys, Vectors

# `Contents`: what a checkpoint of another system has, in Karvan's terms; its rows are read in pieces.


Advance: TypeAlias = Callable[[int], None]  # called with a number of bytes that have been read

PIECE_ROWS = 1 << 16  # rows that are read together, at most
PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class ForeignTable:
    """A table: each row has `state` floats of optimizer state, of the kind `optimizer`; None has none."""

    name: str
    dim: int
    dtype: str
    optimizer: str | None
    state: int
    rows: int


@dataclass
class Contents(ABC):
    """A checkpoint of another system; everything but the rows has been read and checked.

    state: the tree of state of Karvan's checkpoint. notes: what the user has to know of the import, for
    example what was not imported and why.
    """

    system: str
    source: Path
    step: int
    tables: dict[str, ForeignTable] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    @abstractmethod
    def bytes(self) -> int:
        """How many bytes `rows` will read."""

    @abstractmethod
    def rows(self, advance: Advance) -> Iterator[tuple[str, Rows]]:
        """All rows in pieces, each with the name of its table, in any order."""


def make_rows(keys: Keys, vectors: Vectors, state: Vectors, last_steps: Counts) -> Rows:
    """Rows of another system, which does not count uses: each was used at least once."""
    keys, vectors, state, last_steps = map(np.ascontiguousarray, (keys, vectors, state, last_steps))
    return Rows(keys, vectors, state, np.ones(len(keys), np.uint32), last_steps)


def state_floats(optimizer: str | None, dim: int) -> int:
    """How many floats of state a row has by the kind of its optimizer."""
    return {"Adam": 2 * dim, "Adagrad": dim, "Adagrad by row": 1, None: 0}[optimizer]


# Reads files of `torch.save` that hold tensors and plain values alone; nothing in them is executed.


_DDP = "module."  # before the names of a net within DistributedDataParallel


class CodeInFileError(CheckpointError):
    """A file whose objects can be made only by running code."""


def read_torch(path: Path) -> dict[str, Any]:
    """The dict in a file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CodeInFileError(
            path,
            "expected a file of torch.save with tensors and plain values alone, because Karvan runs no "
            f"code of a checkpoint, got: {_first_line(error)}",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(
            path, f"expected a whole file of torch.save, got: {_first_line(error)}"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError.mismatch(path, "a dict", type(content).__name__)
    return dict(content)


def read_tensors(path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The tensors of a net's state dict in a file, without the prefix of DistributedDataParallel."""
    content = read_torch(path)
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    missing = [name for name in content if name not in tensors]
    if (missing and not tensors) or not all(isinstance(name, str) for name in tensors):
        wrong = next(iter(missing), None) or next(name for name in tensors if not isinstance(name, str))
        raise CheckpointError.mismatch(
            path, "a state dict of tensors by name", f"{type(content[wrong]).__name__} as {wrong!r}"
        )
    if missing:
        listed = ", ".join(f"'{name}'" for name in missing)
        notes.append(f"{path.name}: not imported, because it is not a tensor: {listed}.")
    if tensors and all(name.startswith(_DDP) for name in tensors):
        tensors = {name.removeprefix(_DDP): value for name, value in tensors.items()}
    return tensors


def read_dense(contents: Contents, name: str, prefix: str, skipped: tuple[str, ...] = ()) -> bool:
    """Take the net's tensors from a file of a checkpoint, if there is one; skipped: ends of other names."""
    path = contents.source / name
    exists = path.is_file()
    if not exists:
        contents.notes.append(f"There is no {name}: no dense tensor was imported.")
    tensors = read_tensors(path, contents.notes) if exists else {}
    contents.state["model"] = {
        prefix + tensor: value for tensor, value in tensors.items() if not tensor.endswith(skipped)
    }
    return exists


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".") + "."


# Rows that come in any order, divided into parts of key hashes by files: memory holds one part at a time.


class HashSpill(Capture):
    """`add` appends rows to the files of their parts; `part` reads one back, in the order of hashes.

    folder: exists, and is empty. source: the checkpoint that the rows come from, for errors.
    """

    def __init__(
        self, folder: Path, source: Path, tables: Mapping[str, ForeignTable], part_bytes: int
    ) -> None:
        self.versions = {}
        self._folder = folder
        self._source = source
        self._tables = dict(tables)
        self._numbers = {name: number for number, name in enumerate(tables)}
        self.parts = {name: _parts(table, part_bytes) for name, table in tables.items()}

    def add(self, name: str, rows: Rows) -> None:
        """Append rows of a table."""
        table, parts = self._tables[name], self.parts[name]
        records = np.empty(len(rows.keys), _record(table))
        records["key"], records["last_step"] = rows.keys, rows.last_steps
        records["vector"], records["state"] = rows.vectors, rows.state
        shift = np.uint64(64 - (parts.bit_length() - 1))
        part_of = hashes_of(rows.keys) >> shift if parts > 1 else np.zeros(len(rows.keys), np.uint64)
        order = np.argsort(part_of, kind="stable")
        present, begins = np.unique(part_of[order], return_index=True)
        ends = [*begins[1:], len(order)]
        for part, begin, end in zip(present.tolist(), begins.tolist(), ends, strict=True):
            with self._path(name, part).open("ab") as file:
                file.write(records[order[begin:end]].tobytes())

    @override
    def part(self, table: str, part: int) -> Rows:
        """An error if a key occurs twice."""
        path = self._path(table, part)
        layout = _record(self._tables[table])
        existing = np.fromfile(path, layout) if path.exists() else np.empty(0, layout)
        path.unlink(missing_ok=True)
        existing = existing[np.argsort(hashes_of(np.ascontiguousarray(existing["key"])))]
        keys = existing["key"]
        if (again := keys[1:] == keys[:-1]).any():
            raise DamagedCheckpointError.mismatch(
                self._source, f"each id of table '{table}' once", f"the id {keys[1:][again][0]} twice"
            )
        return make_rows(keys, existing["vector"], existing["state"], existing["last_step"])

    def erased(self, table: str) -> Keys:
        """None: a full checkpoint."""
        return np.empty(0, np.int64)

    def close(self) -> None:
        """Nothing to release: the folder is removed by its owner."""

    def _path(self, table: str, part: int) -> Path:
        return self._folder / f"{self._numbers[table]}-{part}"


def _parts(table: ForeignTable, part_bytes: int) -> int:
    """How many equal parts, a power of two, so that none is much above `part_bytes`."""
    total = table.rows * row_bytes(table.dim, table.dtype, table.state)
    return 1 << max(0, -(-total // part_bytes) - 1).bit_length()


def _record(table: ForeignTable) -> np.dtype[np.void]:
    counts = [("key", "<i8"), ("last_step", "<u4")]
    return np.dtype([*counts, ("vector", "<f4", (table.dim,)), ("state", "<f4", (table.state,))])


PART_BYTES = 64 << 20

# Called with the bytes that were read since the last call, and with how many will be read in all.
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class ImportReport:
    """What was imported from another system.

    Attributes:
        path: The new checkpoint.
        system: The other system.
        step: The step of the checkpoint.
        tables: The tables, with name, dim, dtype, optimizer, state and rows.
        dense: The names of the dense tensors.
        notes: What you have to know, for example what was not imported and why.

    Example:
        >>> def convert(source):
        ...     report = kv.checkpoint.import_recis(source, "imported")
        ...     for note in report.notes:
        ...         print(note)
    """

    path: Path
    system: str
    step: int
    tables: list[ForeignTable]
    dense: list[str]  # names of the dense tensors
    notes: list[str]


def check_new(target: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint to write; an error if there is something."""
    path = local_path(target)
    path = path if url_of(path) is not None else Path(os.path.abspath(path))
    _require_new(path)
    return path


def check_step(step: int) -> int:
    """A step, if rows can have it."""
    if not 0 <= step < 2**32:
        raise ValueError(f"step expects a number from 0 to 2^32 - 1, got {step}.")
    return step


def write(contents: Contents, target: Path, progress: Progress, part_bytes: int = PART_BYTES) -> ImportReport:
    """Write a checkpoint to `target`, where there is nothing yet."""
    explaining(target, lambda: _write(contents, target, progress, part_bytes))()
    return ImportReport(
        target,
        contents.system,
        contents.step,
        list(contents.tables.values()),
        list(contents.state.get("model", {})),
        contents.notes,
    )


def _write(contents: Contents, target: Path, progress: Progress, part_bytes: int) -> Checkpoint:
    with ExitStack() as stack:
        hidden = new_folder(target)
        stack.callback(hidden.remove)
        if isinstance(hidden, HiddenFolder):  # a leftover of a killed import is removed by the next save
            row_files = hidden.path / "rows"
        else:
            row_files = Path(stack.enter_context(TemporaryDirectory(prefix="karvan-import-"))) / "rows"
        row_files.mkdir()
        spill = HashSpill(row_files, contents.source, contents.tables, part_bytes)
        total = contents.bytes
        for name, rows in contents.rows(lambda size: progress(size, total)):
            spill.add(name, rows)
        sources = {
            name: ShareSource(_spec(table), table.optimizer, spill, spill.parts[name], {}, False, 0, 1)
            for name, table in contents.tables.items()
        }
        mark = {"system": contents.system, "source": contents.source.name}
        tree, tensors = encode({**contents.state, ORIGIN: mark})
        dense: list[FileEntry] = []
        writers = Writers(pace=Throttle(share=1.0))  # nothing else runs
        try:
            writers.write(dense.append, hidden.path, DENSE, tensors)
            shares = {name: put_table(source, hidden.path, writers) for name, source in sources.items()}
            writers.finish()
        finally:
            writers.end()
        shutil.rmtree(row_files)
        tables = {
            name: joined(hidden.path, sources[name].spec, sources[name].optimizer, [describe()])
            for name, describe in shares.items()
        }
        manifest = Manifest(
            step=contents.step, kind="full", base=None, metrics={}, tables=tables, dense=dense[0], state=tree
        )
        data = hidden.complete(manifest, writers.pace, lambda: _require_new(target))
    return Checkpoint(target, manifests.parse(target / manifests.NAME, data))


def _spec(table: ForeignTable) -> TableSpec:
    return Table(table.dim, dtype=getattr(torch, table.dtype)).spec(table.name, seed=0, shards=1)


def _require_new(target: Path) -> None:
    if manifests.is_taken(target):
        raise CheckpointError(
            target,
            "expected a folder that does not exist yet, to write the checkpoint to, got one that does.",
        )
