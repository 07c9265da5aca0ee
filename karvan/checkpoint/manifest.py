"""`manifest.json`: the contents of a checkpoint, with a checksum of every file and of itself.

The first line of the file carries the checksum of all bytes that follow it, so that anyone can check it:
`tail -n +2 manifest.json | crc32 /dev/stdin`. docs/checkpoint.md shows the files of a checkpoint; this is the
rest:

- **Parts** of a table are ranges of key hashes (`csrc/hash/mix.h`, version 1), so choosing files means
  choosing shards. A part's entry has the upper 32 bits of its least hash, `first`; it ends where the next
  one starts. One process divides a table into a power of two of equal parts. With several ranks, each rank
  does the same with a number of parts that suits its own rows, and writes the hashes that it owns of each
  part. Manifests without `first` have equal parts.
- **Extras** (`extras` of a table): a file, or null, for each rank that saved it; rank 0's has the clock. A
  file has the counters of the rank's own hashes, `filter_counts`, and `filter_place`: their position in the
  whole filter, and its size. If two ranks have the same counter, the larger one counts. Older manifests
  have one file, `extra`.
- **Updates** (`updates` of a table on parameter servers): for each server, how many updates its rows
  contain, by the `run` and `store` in which they are counted and by trainer. From it a restarted server
  knows which updates are lost.
- **Deltas**: `base` is the folder, step, id and checksum of the checkpoint before. A key can be removed and
  added again, so a delta is applied by removing its keys first.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.files import has_file, read_bytes
from karvan.checkpoint.safetensors_file import FileEntry, checksum_text, unread_error
from karvan.errors import RefusedError
from karvan.job.checkpoint_url import url_of
from karvan.store.messages import first_hash_of, hashes_of
from karvan.store.types import Keys
from karvan.wire.schema import Fields, Integer, ListOf, MapOf, Nullable, OneOf, Plain, Text, shown

# Ranges of key hashes, by which tables are divided over ranks and files.
#
# A range is one of the upper 32 bits of hashes, so that its bounds are integers for any number of ranks.


SPACE = 1 << 32


class Range(NamedTuple):
    """The hashes whose upper 32 bits are at least `first` and below `end`."""

    first: int
    end: int

    def overlaps(self, other: Range) -> bool:
        """Whether a hash is in both."""
        return self.first < other.end and other.first < self.end

    def inside(self, other: Range) -> bool:
        """Whether the other range contains all of it."""
        return other.first <= self.first and self.end <= other.end

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Which keys have a hash in it."""
        upper = hashes_of(keys) >> np.uint64(32)
        mask: NDArray[np.bool_] = (upper >= np.uint64(self.first)) & (upper < np.uint64(self.end))
        return mask


WHOLE = Range(0, SPACE)


def share_of(rank: int, ranks: int) -> Range:
    """The range that a rank owns."""
    return Range(first_hash_of(rank, ranks) >> 32, first_hash_of(rank + 1, ranks) >> 32)


def between(cuts: Sequence[int]) -> list[Range]:
    """The ranges that start at these cuts; each ends at the next one."""
    return [Range(first, end) for first, end in zip(cuts, [*cuts[1:], SPACE], strict=True)]


def pieces(parts: int, share: Range) -> dict[int, Range]:
    """Of so many equal parts, those that overlap a share, each with the range they have in common."""
    width = SPACE // parts
    return {
        part: Range(max(part * width, share.first), min((part + 1) * width, share.end))
        for part in range(share.first // width, -(-share.end // width))
    }


NAME = "manifest.json"
FORMAT = "karvan-checkpoint"
VERSION = 1
MIX_VERSION = 1  # of the hash that divides tables into parts; see csrc/hash/mix.h
_FIRST_LINE = re.compile(rb'\{"checksum": "(crc32:[0-9a-f]{8})",\n')


@dataclass(frozen=True)
class PartEntry(FileEntry):
    """One part of a table: the rows in a range of key hashes, and in a delta the keys that were removed.

    first: the upper 32 bits of its smallest hash; it ends where the next part starts.
    """

    rows: int
    erased: int = 0
    first: int = 0


@dataclass(frozen=True)
class TableEntry:
    """A table: each row has `state` floats of optimizer state, of the kind `optimizer`."""

    dim: int
    dtype: str
    state: int
    optimizer: str | None
    admit: list[Any]
    evict: list[Any]
    init: list[Any]
    seed: int
    rows: int
    parts: list[PartEntry]
    extras: list[FileEntry | None]  # by the ranks that have saved it; empty if there are none
    # By parameter server: how many updates of a run its rows contain; see `UpdateCounts`.
    updates: list[dict[str, Any] | None] = field(default_factory=list)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in its file."""
        return row_bytes(self.dim, self.dtype, self.state)

    @property
    def files(self) -> list[FileEntry]:
        """All files of the table."""
        return [*self.parts, *(extra for extra in self.extras if extra)]

    @property
    def ranges(self) -> list[Range]:
        """The hashes of each part."""
        return between([part.first for part in self.parts])


# The form of the file, which anyone may have written: kinds and bounds of all values.
_SIZE = Integer(0, 2**53)
_FILE = {"name": Text(4096), "bytes": _SIZE, "checksum": Text(100)}
_PARTS = Fields(_FILE | {"rows": _SIZE}, {"erased": _SIZE, "first": _SIZE})
_EXTRA = Nullable(Fields(_FILE))
_TABLE = Fields(
    {
        "dim": Integer(1, 2**24),
        "dtype": Text(100),
        "state": Integer(0, 2**26),
        "optimizer": Nullable(Text(100)),
        **dict.fromkeys(("admit", "evict", "init"), ListOf(Plain(), 100, 1)),
        "seed": Integer(-(2**63), 2**64),
        "rows": _SIZE,
        "parts": ListOf(_PARTS, shortest=1),
    },
    {"extras": ListOf(_EXTRA), "extra": _EXTRA, "updates": ListOf(Nullable(MapOf(Plain())))},
)
_BASE = Fields({"folder": Text(4096), "step": _SIZE, "id": Text(1000), "checksum": Text(100)})
_FORM = Fields(
    {
        "checksum": Text(100),
        "step": _SIZE,
        "kind": OneOf("full", "delta"),
        **dict.fromkeys(("id", "created", "karvan"), Text(1000, 0)),
        "base": Nullable(_BASE),
        "metrics": Plain(),
        "tables": MapOf(_TABLE, names=Text(4096, 0)),
        "dense": Fields(_FILE),
        "state": Plain(),
    }
)


def row_bytes(dim: int, dtype: str, state: int) -> int:
    """Bytes of a row in its file: key, vector, state, count and last step."""
    return 8 + dim * (4 if dtype == "float32" else 2) + 4 * state + 8


@dataclass(frozen=True)
class Base:
    """The checkpoint that a delta adds to; `id` and `checksum` are those of its manifest."""

    folder: str
    step: int
    id: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint says about itself."""

    step: int
    kind: str  # full or delta
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    karvan: str = field(default_factory=partial(version, "karvan"))
    base: Base | None
    metrics: Any  # as the tree of state
    tables: dict[str, TableEntry]
    dense: FileEntry
    state: Any  # see state_tree.py
    checksum: str = ""

    @property
    def files(self) -> list[FileEntry]:
        """All files but the manifest."""
        return [self.dense, *(file for table in self.tables.values() for file in table.files)]


def to_bytes(manifest: Manifest) -> bytes:
    """The file."""
    content = {"format": FORMAT, "version": VERSION, "mix": MIX_VERSION}
    content |= {f.name: getattr(manifest, f.name) for f in fields(Manifest) if f.name != "checksum"}
    text = json.dumps(content, default=asdict, allow_nan=False, indent=1)
    rest = text.removeprefix("{\n").encode()
    return f'{{"checksum": "{checksum_text(zlib.crc32(rest))}",\n'.encode() + rest


def read(folder: Path) -> Manifest:
    """The manifest of a folder, once its checksum and form are right."""
    path = folder / NAME
    try:
        data = read_bytes(path)
    except FileNotFoundError as error:
        kind, received = CheckpointError, "no such folder"
        if url_of(folder) is None and folder.is_dir():
            kind, received = DamagedCheckpointError, "none"
        raise kind.mismatch(folder, f"a checkpoint, with a {NAME}", received) from error
    except OSError as error:
        raise unread_error(path, error) from error
    first = _FIRST_LINE.match(data)
    if not first:
        raise DamagedCheckpointError.mismatch(
            path, "a first line with a checksum, as Karvan writes it", repr(data[:40])
        )
    expected, received = first[1].decode(), checksum_text(zlib.crc32(data[first.end() :]))
    if expected != received:
        raise DamagedCheckpointError.mismatch(path, f"{expected} over the lines after the first", received)
    return parse(path, data)


def is_taken(folder: Path) -> bool:
    """Whether something has the name of a checkpoint; at a URL, only its manifest counts."""
    return folder.exists() if url_of(folder) is None else has_file(folder / NAME)


def parse(path: Path, data: bytes) -> Manifest:
    """The manifest in a file's bytes, whose checksum is right; `path` is for errors."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError.mismatch(path, "JSON", f"'{error}'") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError.mismatch(path, "an object of JSON", shown(content))
    for key, expected in (("format", FORMAT), ("version", VERSION), ("mix", MIX_VERSION)):
        received = content.pop(key, None)
        if received != expected:
            raise CheckpointError.mismatch(path, f"{key} {expected!r}", shown(received))
    try:
        content = _FORM.check(content, "the manifest")
        content["tables"] = {name: _table(name, entry) for name, entry in content["tables"].items()}
        content["dense"] = FileEntry(**content["dense"])
        content["base"] = content["base"] and Base(**content["base"])
        manifest = Manifest(**content)
        _check(manifest)
    except (RefusedError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise DamagedCheckpointError.mismatch(path, "the fields of a manifest", f"'{error}'") from error
    return manifest


def _table(name: str, entry: Mapping[str, Any]) -> TableEntry:
    content = dict(entry)
    parts = [dict(part) for part in content.pop("parts")]
    if not any("first" in part for part in parts):  # an earlier format of single processes: equal parts
        count = len(parts)
        _require(count > 0 and count & (count - 1) == 0, f"table '{name}' has {count} parts")
        parts = [part | {"first": index * (SPACE // count)} for index, part in enumerate(parts)]
    _require(all("first" in part for part in parts), f"table '{name}' has parts without 'first'")
    extras = content.pop("extras", None)
    if extras is None:  # also an earlier format
        only = content.pop("extra")
        extras = [only] if only else []
    return TableEntry(
        **content,
        parts=[PartEntry(**part) for part in parts],
        extras=[extra and FileEntry(**extra) for extra in extras],
    )


def _check(manifest: Manifest) -> None:
    _require((manifest.kind == "delta") == (manifest.base is not None), "a delta has a base, a full one none")
    if manifest.base is not None:
        _require(
            PurePosixPath(manifest.base.folder).name not in ("", ".."),
            f"the base is '{manifest.base.folder}'",
        )
    for name, table in manifest.tables.items():
        cuts = [part.first for part in table.parts]
        _require(
            all(type(cut) is int and 0 <= cut < SPACE for cut in cuts)
            and cuts == sorted(set(cuts))
            and cuts[:1] == [0],
            f"the parts of table '{name}' do not cover all hashes once: they begin at {cuts[:9]}",
        )
        _require(
            table.rows == sum(p.rows for p in table.parts), f"table '{name}' and its parts differ in rows"
        )
        _require(table.dtype in ("float32", "bfloat16", "float16"), f"table '{name}' is of {table.dtype}")
    names = [file.name for file in manifest.files]
    _require(len(set(names)) == len(names), "a file is listed twice")
    for name in names:
        path = PurePosixPath(name)
        # Names come from a file that anyone may have written.
        _require(
            not path.is_absolute() and ".." not in path.parts and path.parts != () and "\0" not in name,
            f"a file is outside: '{name}'",
        )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
