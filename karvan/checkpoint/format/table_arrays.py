"""Tables in files: the tables of a model, their number of parts, and rows to and from a part's arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from torch import nn

from karvan import ids
from karvan.checkpoint.errors import DamagedCheckpointError
from karvan.checkpoint.format.manifest import WHOLE, PartEntry, Range, TableEntry, row_bytes, share_of
from karvan.checkpoint.format.safetensors_file import FileEntry, Stored, read_arrays, read_header, stored
from karvan.embedding import EmbeddingEngine, TableHandle
from karvan.store import Rows
from karvan.store.messages import counters_of, hashes_of
from karvan.store.types import Keys

Model: TypeAlias = nn.Module | Iterable[nn.Module] | None

_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def tables_of(model: Model) -> dict[str, TableHandle]:
    """The tables of all engines in a model, by name; one that engines share is listed once."""
    modules = [] if model is None else [model] if isinstance(model, nn.Module) else list(model)
    handles: dict[str, TableHandle] = {}
    for module in modules:
        for engine in module.modules():
            if not isinstance(engine, EmbeddingEngine):
                continue
            for handle in engine.tables():
                other = handles.setdefault(handle.name, handle)
                if other.store is not engine.store:
                    raise ValueError(
                        f"Two engines have a table '{handle.name}' in different stores: expected names "
                        f"that differ, or one store for both."
                    )
                if other.optimizer is None:
                    handles[handle.name] = handle
    return handles


def engine_entries(model: Model, step: int) -> dict[str, Any]:
    """The engines' entries of the model's state dict at a step, whose rows have been loaded.

    Checkpoints of other systems lack them.
    """
    if not isinstance(model, nn.Module):
        return {}
    return {
        f"{name}._extra_state".lstrip("."): {
            "step": step,
            "tables": {table.name: {"dim": table.dim, "rows": None} for table in engine.tables()},
        }
        for name, engine in model.named_modules()
        if isinstance(engine, EmbeddingEngine)
    }


def parts_for(handle: TableHandle, part_bytes: int) -> int:
    """How many equal parts of all hashes, a power of two, so that none is much above `part_bytes`.

    A rank that owns one of n shares has a file for each part that overlaps its share.
    """
    total = handle.rows * row_bytes(handle.dim, handle.spec.dtype, len(handle.initial_state))
    parts = -(-total // part_bytes)
    if parts > 1:
        parts *= handle.store.share[1]
    return 1 << max(0, parts - 1).bit_length()


def folder_of(table: str) -> str:
    """A folder's name for any table's name."""
    name = quote(table, safe=" ,;=+@~()[]{}#!$&'^")
    if name.startswith(".") or not name:
        name = "%2E" + name[1:] if name else "%"
    if len(name) > 200:
        name = f"{name[:180]}-{ids.farm(table) & (2**64 - 1):016x}"
    return f"tables/{name}"


def file_name(what: str, rank: int, ranks: int) -> str:
    """The name of a table's file; it includes the rank if there are several."""
    return f"{what}.safetensors" if ranks == 1 else f"rank-{rank:05d}-{what}.safetensors"


def to_arrays(rows: Rows, erased: Keys | None, dtype: str) -> dict[str, Stored]:
    """Rows as a part's arrays. Vectors come last, so that all arrays are aligned to their elements."""
    arrays = {"keys": stored(rows.keys)}
    if erased is not None:
        arrays["erased"] = stored(erased)
    arrays["state"] = stored(rows.state)
    arrays["counts"] = stored(rows.counts)
    arrays["last_steps"] = stored(rows.last_steps)
    vectors: NDArray[Any] = rows.vectors
    if dtype == "bfloat16":  # the lower half is zero, as the values come from a table of this type
        vectors = (np.ascontiguousarray(vectors).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    elif dtype == "float16":
        vectors = vectors.astype(np.float16)
    arrays["vectors"] = stored(vectors, _CODES[dtype])
    return arrays


def read_part(folder: Path, table: TableEntry, part: PartEntry, delta: bool) -> tuple[Rows, Keys]:
    """The rows of a part, and the keys that were removed."""
    check_part(folder, table, part, delta)
    data = {name: array.data for name, array in read_arrays(folder, part).items()}
    if table.dtype == "bfloat16":
        vectors = (data["vectors"].view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif table.dtype == "float16":
        vectors = data["vectors"].view(np.float16).astype(np.float32)
    else:
        vectors = data["vectors"].view(np.float32)
    rows = Rows(
        data["keys"].view(np.int64),
        vectors.reshape(part.rows, table.dim),
        data["state"].view(np.float32).reshape(part.rows, table.state),
        data["counts"].view(np.uint32),
        data["last_steps"].view(np.uint32),
    )
    return rows, data["erased"].view(np.int64) if delta else np.empty(0, np.int64)


def check_part(folder: Path, table: TableEntry, part: PartEntry, delta: bool) -> None:
    """Raise unless the file's header is that of this part."""
    path = folder / part.name
    arrays = read_header(path)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "keys": ("I64", (part.rows,)),
        "state": ("F32", (part.rows, table.state)),
        "counts": ("U32", (part.rows,)),
        "last_steps": ("U32", (part.rows,)),
        "vectors": (_CODES[table.dtype], (part.rows, table.dim)),
    }
    if delta:
        expected["erased"] = ("I64", (part.erased,))
    for name, (dtype, shape) in expected.items():
        received = arrays.get(name)
        if received is None:
            raise DamagedCheckpointError.mismatch(path, f"an array '{name}'", ", ".join(arrays) or "no array")
        if (received.dtype, received.shape) != (dtype, shape):
            raise DamagedCheckpointError.mismatch(
                path, f"'{name}' of {dtype} {shape}", f"{received.dtype} {received.shape}"
            )


def select(rows: Rows, which: NDArray[Any]) -> Rows:
    """Some of the rows, by a mask or indices."""
    return Rows(
        rows.keys[which],
        rows.vectors[which],
        rows.state[which],
        rows.counts[which],
        rows.last_steps[which],
    )


def join(pieces: Sequence[Rows]) -> Rows:
    """The rows of all pieces."""
    return Rows(
        np.concatenate([rows.keys for rows in pieces]),
        np.concatenate([rows.vectors for rows in pieces]),
        np.concatenate([rows.state for rows in pieces]),
        np.concatenate([rows.counts for rows in pieces]),
        np.concatenate([rows.last_steps for rows in pieces]),
    )


def overlay(rows: Rows, erased: Keys, changed: Rows) -> Rows:
    """Rows after a delta: erased keys are removed, then changed rows added; a key may be in both."""
    unchanged = select(rows, ~np.isin(rows.keys, np.concatenate([erased, changed.keys])))
    both = join([unchanged, changed])
    return select(both, np.argsort(hashes_of(both.keys)))


# What tables hold in addition to rows, in files: counters of an admission filter, a clock.
#
# Every rank writes the counters of the hashes it owns, and rank 0 the clock. A process that loads reads the
# files of those ranks whose hashes it owns; if two of them have the same counter, the larger value counts.


Extra = dict[str, NDArray[Any]]

_FILTER = "filter_counts"
_POSITION = "filter_place"  # the index of a piece's first counter, and the number of all counters
_NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "I64": np.int64,
    "U64": np.uint64,
    "I32": np.int32,
    "U32": np.uint32,
    "U8": np.uint8,
}


def own_extra(extra: Mapping[str, NDArray[Any]], rank: int, ranks: int) -> Extra:
    """The part of a table's extra that a rank writes; all of it if there is one rank."""
    share = share_of(rank, ranks)
    if share == WHOLE:
        return dict(extra)
    content: Extra = {}
    if _FILTER in extra:
        counters = extra[_FILTER]
        piece = counters_of(share.first, share.end, len(counters))
        content = {
            _FILTER: counters[piece].copy(),
            _POSITION: np.array([piece.start, len(counters)], np.int64),
        }
    if rank == 0:
        content |= {name: array for name, array in extra.items() if name != _FILTER}
    return content


def read_extras(folder: Path, files: Sequence[FileEntry | None], share: Range) -> Extra:
    """The extra that a store with a share of the hashes needs, from the ranks' files."""
    extra: Extra = {}
    for rank, file in enumerate(files):
        if file is None or not (rank == 0 or share_of(rank, len(files)).overlaps(share)):
            continue
        arrays = _read(folder, file)
        counters, position = arrays.pop(_FILTER, None), arrays.pop(_POSITION, None)
        if counters is not None:
            begin, total = (0, len(counters)) if position is None else position.tolist()
            merged = extra.setdefault(_FILTER, np.zeros(total, counters.dtype))
            if len(merged) != total or not 0 <= begin <= total - len(counters):
                raise DamagedCheckpointError.mismatch(
                    folder / file.name,
                    f"{len(counters)} out of {len(merged)} counters",
                    f"those from {begin} on of {total}",
                )
            piece = merged[begin : begin + len(counters)]
            np.maximum(piece, counters, out=piece)
        for name, array in arrays.items():
            extra.setdefault(name, array)
    return extra


def _read(folder: Path, file: FileEntry) -> Extra:
    return {
        name: array.data.view(_NUMPY[array.dtype]).reshape(array.shape)
        for name, array in read_arrays(folder, file).items()
    }
