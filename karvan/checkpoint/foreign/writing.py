"""Writes the contents of a foreign checkpoint as a checkpoint of Karvan, complete or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from karvan.checkpoint.checkpoint import ORIGIN, Checkpoint
from karvan.checkpoint.errors import CheckpointError
from karvan.checkpoint.foreign.contents import Contents, ForeignTable
from karvan.checkpoint.foreign.hash_spill import HashSpill
from karvan.checkpoint.format import manifest as manifests
from karvan.checkpoint.format.atomic_folder import HiddenFolder
from karvan.checkpoint.format.manifest import Manifest
from karvan.checkpoint.format.safetensors_file import FileEntry, Stored, write_arrays
from karvan.checkpoint.format.state_tree import encode
from karvan.checkpoint.io.pending_save import Writers
from karvan.checkpoint.io.table_share import ShareSource, joined, put_table
from karvan.checkpoint.io.throttle import Throttle
from karvan.checkpoint.io.writer import explaining, publish_folder
from karvan.checkpoint.object_store.step_objects import UploadFolder
from karvan.embedding import Table
from karvan.job.checkpoint_url import local_path, url_of
from karvan.store import TableSpec

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
        hidden = HiddenFolder(target) if url_of(target) is None else UploadFolder(target)
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
        pace = Throttle(share=1.0)  # nothing else runs
        specs = {name: _spec(table) for name, table in contents.tables.items()}
        shares, dense, tree = _put(contents, hidden.path, spill, specs, pace)
        shutil.rmtree(row_files)
        manifest = Manifest(
            step=contents.step,
            kind="full",
            id=secrets.token_hex(16),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            karvan=version("karvan"),
            base=None,
            metrics={},
            tables={
                name: joined(hidden.path, specs[name], table.optimizer, [shares[name]])
                for name, table in contents.tables.items()
            },
            dense=dense,
            state=tree,
        )
        text = publish_folder(hidden, manifest, pace, lambda: _require_new(target))
    return Checkpoint(target, manifests.parse(target / manifests.NAME, text.encode()))


def _put(
    contents: Contents, folder: Path, spill: HashSpill, specs: Mapping[str, TableSpec], pace: Throttle
) -> tuple[dict[str, dict[str, Any]], FileEntry, Any]:
    """Write all files but the manifest; returns what describes the tables, the dense state and its tree."""
    mark = {"system": contents.system, "source": contents.source.name}
    tree, tensors = encode({**contents.state, ORIGIN: mark})
    dense: list[FileEntry] = []
    writers = Writers()

    def put(note: Callable[[FileEntry], None], name: str, arrays: Mapping[str, Stored]) -> None:
        writers.put(lambda: note(write_arrays(folder, name, arrays, pace)))

    try:
        put(dense.append, "dense.safetensors", tensors)
        made = {
            name: put_table(
                ShareSource(spec, contents.tables[name].optimizer, spill, spill.parts[name], {}, False, 0, 1),
                folder,
                put,
                pace,
            )
            for name, spec in specs.items()
        }
        writers.finish()
    finally:
        writers.end()
    return {name: describe() for name, describe in made.items()}, dense[0], tree


def _spec(table: ForeignTable) -> TableSpec:
    return Table(table.dim, dtype=getattr(torch, table.dtype)).spec(table.name, seed=0, shards=1)


def _require_new(target: Path) -> None:
    if manifests.is_taken(target):
        raise CheckpointError(
            target,
            "expected a folder that does not exist yet, to write the checkpoint to, got one that does.",
        )
