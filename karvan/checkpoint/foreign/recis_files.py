"""The files of a RecIS checkpoint: which tensors they hold, and where.

    index                        JSON: "file_index", files by number; "block_index", the file of each tensor
    tensorkey.json               JSON: a tensor's name in its file → the name that RecIS gives it
    model-000000-of-000008.safetensors, …     the tensors, in files of the safetensors layout

RecIS names a tensor of a table `TABLE@SLOT^BEGIN@END@SIZE`: the slot `id` has the ids, `embedding` the
vectors, others the state of optimizers and filters, row by row in the same order. A rank saves the ids of its
slice of SIZE, and in the file the name is `TABLE.SLOT/part_RANK_RANKS`. Tables that RecIS has merged are
saved apart, under their own names and with their own ids. Tensors of sparse optimizers that belong to no row
are named `NAME^ `.

`index` appears last: without it the checkpoint is incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.format.safetensors_file import FilePosition, read_header, unread_error

INDEX, NAMES, RUN = "index", "tensorkey.json", "checkpoint"
ID, VECTORS = "id", "embedding"
_TENSOR = re.compile(r"^(?P<table>[^@^]+)@(?P<slot>[^@^]+)\^(?P<begin>\d+)@(?P<end>\d+)@(?P<size>\d+)$")
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    position: FilePosition

    @property
    def rows(self) -> int:
        """Its first dimension."""
        return self.position.shape[0] if self.position.shape else 1

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Some rows, as they are stored; bfloat16 as uint16."""
        width = self.position.size // self.rows if self.rows else 0
        try:
            with self.path.open("rb") as file:
                file.seek(self.position.begin + begin * width)
                data = file.read((end - begin) * width)
        except OSError as error:
            raise unread_error(self.path, error) from error
        if len(data) != (end - begin) * width:
            raise DamagedCheckpointError.mismatch(self.path, f"{(end - begin) * width} bytes", len(data))
        array = np.frombuffer(data, _NUMPY[self.position.dtype])
        return array.reshape(end - begin, *self.position.shape[1:])


@dataclass
class RankPart:
    """The part of a table that one rank has saved: its slice, and the tensors of its slots."""

    begin: int
    end: int
    size: int
    slots: dict[str, StoredTensor] = field(default_factory=dict)


@dataclass
class Files:
    """All tensors of a checkpoint: the parts of tables by rank slice, and those of no table."""

    folder: Path
    tables: dict[str, list[RankPart]]
    scalars: dict[str, StoredTensor]


def find_folder(source: Path) -> Path:
    """The folder of a checkpoint: `source`, or the newest of an output_dir, which its `checkpoint` lists."""
    if (source / INDEX).is_file() or not (source / RUN).is_file():
        return source
    listed = [line.strip() for line in (source / RUN).read_text().splitlines() if line.strip()]
    if not listed:
        raise CheckpointError.mismatch(source / RUN, "the names of checkpoints", "none")
    if Path(listed[-1]).name != listed[-1]:
        raise CheckpointError.mismatch(source / RUN, "names of folders beside it", repr(listed[-1]))
    return source / listed[-1]


def read_files(folder: Path) -> Files:
    """The tensors of a checkpoint; every file's header is read and checked."""
    if not folder.is_dir():
        raise CheckpointError.mismatch(folder, "the folder of a RecIS checkpoint", "no such folder")
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            folder,
            f"expected a RecIS checkpoint, with the file '{INDEX}', which RecIS writes last, got none: it is "
            "incomplete, or not of RecIS.",
        )
    names = _names(folder / NAMES)
    index = _json(folder / INDEX)
    files, blocks = (_numbers(folder / INDEX, key, index.get(key)) for key in ("file_index", "block_index"))
    headers = {number: _header(folder, name) for name, number in files.items()}
    by_number = {number: name for name, number in files.items()}
    tables: dict[str, dict[int, RankPart]] = {}
    scalars: dict[str, StoredTensor] = {}
    for stored_name, number in blocks.items():
        if number not in headers or stored_name not in headers[number]:
            where = by_number.get(number, f"a file of the number {number}")
            raise DamagedCheckpointError.mismatch(folder, f"tensor '{stored_name}' in {where}", "none")
        tensor = StoredTensor(folder / by_number[number], headers[number][stored_name])
        if stored_name not in names and stored_name.endswith("^ "):
            scalars[stored_name.removesuffix("^ ")] = tensor
            continue
        name = names.get(stored_name) or stored_name
        match = _TENSOR.match(name)
        if match is None:
            raise CheckpointError.mismatch(
                folder / NAMES, "names like TABLE@SLOT^BEGIN@END@SIZE", f"'{name}' for '{stored_name}'"
            )
        begin, end, size = (int(match[part]) for part in ("begin", "end", "size"))
        part = tables.setdefault(match["table"], {}).setdefault(begin, RankPart(begin, end, size))
        if (part.end, part.size) != (end, size) or match["slot"] in part.slots:
            raise DamagedCheckpointError.mismatch(folder / NAMES, "one tensor of each slice", f"two '{name}'")
        part.slots[match["slot"]] = tensor
    ordered = {table: [parts[begin] for begin in sorted(parts)] for table, parts in sorted(tables.items())}
    for table, parts in ordered.items():
        _check_slices(folder, table, parts)
    return Files(folder, ordered, scalars)


def _check_slices(folder: Path, table: str, parts: list[RankPart]) -> None:
    at = 0
    for part in parts:
        if part.begin != at or part.size != parts[0].size:
            break
        at = part.end
    if at != parts[0].size:
        raise DamagedCheckpointError.mismatch(
            folder,
            f"the parts of all ranks of table '{table}', up to slice {parts[0].size}",
            f"none that begins at slice {at}",
        )


def _numbers(path: Path, key: str, found: Any) -> dict[str, int]:
    """A part of the index: files, or tensors, and the numbers of files."""
    if not isinstance(found, dict) or not all(type(number) is int for number in found.values()):
        raise DamagedCheckpointError.mismatch(path, f"the numbers of files in '{key}'", repr(found)[:60])
    return found


def _names(path: Path) -> dict[str, str]:
    names = _json(path)
    for key, value in names.items():
        if not isinstance(value, str):
            raise DamagedCheckpointError.mismatch(path, "names as text", f"{value!r} for '{key}'")
    return names


def _header(folder: Path, name: str) -> Mapping[str, FilePosition]:
    if Path(name).name != name:
        raise DamagedCheckpointError.mismatch(
            folder / INDEX, "names of files in its folder", repr(name)
        )  # it may have been written by anyone
    if not (folder / name).is_file():
        raise DamagedCheckpointError.mismatch(folder, f"the file '{name}', which its index lists", "none")
    return read_header(folder / name)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise unread_error(path, error) from error
    except ValueError as error:
        raise DamagedCheckpointError.mismatch(path, "JSON", f"'{error}'") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError.mismatch(path, "an object of JSON", type(content).__name__)
    return content
