"""The files of a table's rows: a share that is written, and rows that are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from torch import nn

from karvan import ids
from karvan.activity import activity
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.files import make_folder
from karvan.checkpoint.manifest import WHOLE, PartEntry, Range, TableEntry, pieces, row_bytes, share_of
from karvan.checkpoint.safetensors_file import FileEntry, Stored, Writers, read_arrays, read_header, stored
from karvan.checkpoint.state_tree import as_tensor
from karvan.embedding import EmbeddingEngine, TableHandle
from karvan.store import Capture, Rows, TableSpec
from karvan.store.messages import counters_of, hashes_of
from karvan.store.types import Keys

# Tables in files: the tables of a model, their number of parts, and rows to and from a part's arrays.

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
    return Rows(*(column[which] for column in rows))


def join(pieces: Sequence[Rows]) -> Rows:
    """The rows of all pieces."""
    return Rows(*map(np.concatenate, zip(*pieces, strict=True)))


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
    return {name: as_tensor(array).numpy() for name, array in read_arrays(folder, file).items()}


# Reads the rows of a table from a checkpoint and those it builds on, however they are divided into parts.


class Layer(NamedTuple):
    """A table in one checkpoint of a chain."""

    folder: Path
    entry: TableEntry
    delta: bool


class TableReader:
    """A table in a full checkpoint and the deltas on it, in order."""

    def __init__(self, name: str, layers: Sequence[Layer]) -> None:
        self._layers = list(layers)
        full = layers[0].entry
        for layer in layers[1:]:
            its = layer.entry
            if (its.dim, its.dtype, its.state) != (full.dim, full.dtype, full.state):
                raise DamagedCheckpointError.mismatch(
                    layer.folder,
                    f"table '{name}' as in its base: dim {full.dim}, {full.dtype}, {full.state} of state",
                    f"dim {its.dim}, {its.dtype}, {its.state} of state",
                )

    def parts(self, share: Range = WHOLE) -> Iterator[Rows]:
        """The rows of a share of the hashes, one part of the full checkpoint after the other."""
        full, *deltas = [_Files(layer) for layer in self._layers]
        for range_ in full.ranges:
            if not range_.overlaps(share):
                continue
            overlap = Range(max(range_.first, share.first), min(range_.end, share.end))
            _, rows = full.within(overlap)
            for delta in deltas:
                rows = overlay(rows, *delta.within(overlap))
            activity.advance()
            yield rows

    def row(self, key: int) -> Rows | None:
        """The row of one key; None if it has none."""
        keys = np.array([key & (2**64 - 1)], np.uint64).view(np.int64)
        upper = int(hashes_of(keys)[0]) >> 32
        for folder, entry, delta in reversed(self._layers):
            part = entry.parts[bisect_right(entry.parts, upper, key=lambda part: part.first) - 1]
            rows, erased = read_part(folder, entry, part, delta=delta)
            if (same := rows.keys == keys).any():
                return select(rows, same)
            if (erased == keys).any():
                return None
        return None


class _Files:
    """The parts of a layer; holds the last one that was read, as the next range may start in it."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.ranges = layer.entry.ranges
        self._number = -1
        self._last: tuple[Rows, Keys] | None = None

    def within(self, hashes: Range) -> tuple[Keys, Rows]:
        """Keys that were removed, and rows, of some hashes."""
        erased, rows = [], []
        begin = bisect_right(self.ranges, hashes.first, key=lambda part: part.first) - 1
        for number in range(begin, len(self.ranges)):
            if not self.ranges[number].overlaps(hashes):
                break
            its_rows, its_erased = self._read(number)
            if not self.ranges[number].inside(hashes):
                its_rows = select(its_rows, hashes.has(its_rows.keys))
                its_erased = its_erased[hashes.has(its_erased)]
            rows.append(its_rows)
            erased.append(its_erased)
        return (erased[0], rows[0]) if len(rows) == 1 else (np.concatenate(erased), join(rows))

    def _read(self, number: int) -> tuple[Rows, Keys]:
        if self._last is None or number != self._number:
            self._last = None  # released before the next one is read
            folder, entry, delta = self._layer
            self._last = read_part(folder, entry, entry.parts[number], delta)
            self._number = number
        return self._last


# A rank's share of a checkpoint: its files of every table, and the merged shares of all ranks.
#
# A rank divides all hashes into equal parts, a power of two by its number of rows, and writes those that
# overlap the hashes it owns. A single process owns all of them.


DENSE = "dense.safetensors"  # the file of the dense state


@dataclass(frozen=True)
class ShareSource:
    """A table as it was when it was captured, and how this rank writes it."""

    spec: TableSpec
    optimizer: str | None
    capture: Capture
    parts: int  # of all hashes
    extra: Extra
    delta: bool
    rank: int
    ranks: int


def put_table(
    source: ShareSource, folder: Path, writers: Writers, working: Callable[[], None] = lambda: None
) -> Callable[[], dict[str, Any]]:
    """Write this rank's files of a table; the result describes them in JSON, once they are written.

    working: called after each part.
    """
    name, table_folder = source.spec.name, folder_of(source.spec.name)
    make_folder(folder / table_folder)
    erased = np.unique(source.capture.erased(name)) if source.delta else None
    mine = pieces(source.parts, share_of(source.rank, source.ranks))
    entries: dict[int, PartEntry] = {}
    extra: list[FileEntry] = []
    state_size = 0

    def file(what: str) -> str:
        return f"{table_folder}/{file_name(what, source.rank, source.ranks)}"

    def put_part(part: int, range_: Range, rows: Rows) -> None:
        removed = None if erased is None else erased[range_.has(erased)]
        arrays = to_arrays(rows, removed, source.spec.dtype)
        count, removed_count = len(rows.keys), 0 if removed is None else len(removed)

        def note(entry: FileEntry) -> None:
            entries[part] = PartEntry(**asdict(entry), rows=count, erased=removed_count, first=range_.first)

        writers.write(note, folder, file(f"part-{part:05d}-of-{source.parts:05d}"), arrays)

    for part in range(max(mine) + 1):  # a capture is read from the beginning
        with writers.pace.turn():
            rows = source.capture.part(name, part)
        if part in mine:
            state_size = rows.state.shape[1]
            put_part(part, mine[part], rows)
        working()
    if source.extra:
        arrays = {key: stored(array) for key, array in source.extra.items()}
        writers.write(extra.append, folder, file("extra"), arrays)
    return lambda: {
        "state": state_size,
        "parts": [asdict(entries[part]) for part in sorted(entries)],
        "extra": asdict(extra[0]) if extra else None,
    }


def joined(
    folder: Path, spec: TableSpec, optimizer: str | None, shares: Sequence[Mapping[str, Any]]
) -> TableEntry:
    """The entry of a table, from the shares that ranks have reported, in the order of ranks."""
    sizes = {share["state"] for share in shares}
    if len(sizes) > 1:
        raise CheckpointError.mismatch(
            folder, f"table '{spec.name}' with the same size of optimizer state on all ranks", sorted(sizes)
        )
    parts = [PartEntry(**part) for share in shares for part in share["parts"]]
    extras = [share["extra"] and FileEntry(**share["extra"]) for share in shares]
    updates = [share.get("updates") for share in shares]
    return TableEntry(
        dim=spec.dim,
        dtype=spec.dtype,
        state=sizes.pop(),
        optimizer=optimizer,
        admit=list(spec.admit),
        evict=list(spec.evict),
        init=list(spec.init),
        seed=spec.seed,
        rows=sum(part.rows for part in parts),
        parts=parts,
        extras=extras if any(extras) else [],
        updates=updates if any(updates) else [],
    )
