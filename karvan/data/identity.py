"""What tells one data set from another: `Identity`, the answer to "is this yesterday's data or today's?".

The id is a hash of the parts' names, their numbers of records, and a sample of the bytes, so yesterday's
`part-0.parquet` and today's differ even if they have equally many records. Folders do not count, so that data
may move as a whole, except for those of partitions, such as `day=2026-01-31`.

Any data for `Trainer.fit` may have a method `identity()` that returns one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import fs

from karvan.data.errors import located
from karvan.data.source import Part, Source

_FILES_READ = 16  # whose bytes are looked at: the first, the last, and others in between
_BYTES_READ = 1 << 16  # at each end of a file
_ROWS_READ = 64  # at the start, in the middle and at the end of a table
_FILES_LISTED = 1024


@dataclass(frozen=True)
class Identity:
    """`id` tells data sets apart; `label` tells people which one it is.

    name: by which `fit`, or a `Window`, calls it. files: a hash of each file's path and records, to count
    those that two data sets share; empty for very many. grows: it is the same data tomorrow, with more at its
    end, as a Kafka topic is, so that a fit continues at its position.
    """

    id: str
    label: str
    name: str | None = None
    files: tuple[str, ...] = ()
    grows: bool = False

    def state(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "files": list(self.files)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Identity:
        """What `state` described."""
        return cls(**{**state, "files": tuple(state["files"])})

    @classmethod
    def named(cls, name: str, files: tuple[str, ...] = ()) -> Identity:
        """Data that has a name: the name decides, whatever is in it."""
        return cls(f"name {name}", name, name, files)


def identity_of(source: Source) -> Identity:
    """The identity of a source's records."""
    parts = source.parts()
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{_path_in_id(part.path)} {part.records}\n".encode())
    sample: Callable[[], str] | None = getattr(source, "fingerprint", None)
    digest.update((sample() if sample else "\n".join(part.path for part in parts)).encode())
    return Identity(digest.hexdigest()[:16], _label(parts), files=files_of(source))


def files_of(source: Source) -> tuple[str, ...]:
    """See `Identity.files`."""
    parts = source.parts()
    return tuple(_hash(f"{part.path} {part.records}") for part in parts if len(parts) <= _FILES_LISTED)


def fingerprint_files(filesystem: fs.FileSystem, paths: Sequence[str]) -> str:
    """A hash of the sizes of some files, and of the bytes at both ends of each."""
    some = [paths[place] for place in _spread(len(paths), _FILES_READ)]

    def ends(path: str) -> str:
        with located(path), filesystem.open_input_file(path) as file:
            size = file.size()
            head = file.read_at(min(_BYTES_READ, size), 0)
            tail = file.read_at(min(_BYTES_READ, size), max(0, size - _BYTES_READ))
        return f"{size} {_hash(head)} {_hash(tail)}"

    with ThreadPoolExecutor(min(len(some), 8)) as pool:
        return _hash("\n".join(pool.map(ends, some)))


def fingerprint_table(table: pa.Table) -> str:
    """A hash of the columns, and of some rows."""
    starts = {0, max(0, table.num_rows // 2 - _ROWS_READ // 2), max(0, table.num_rows - _ROWS_READ)}
    rows = [table.slice(start, _ROWS_READ).to_pylist() for start in sorted(starts)]
    return _hash(f"{table.schema.names} {rows}")


def _path_in_id(path: str) -> str:
    *folders, name = path.split("/")
    return "/".join([*(folder for folder in folders if "=" in folder), name])


def _label(parts: Sequence[Part]) -> str:
    if not parts:
        return "no files"
    records = sum(part.records for part in parts)
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return f"{parts[0].path}{more}, {records:,} records"


def _spread(count: int, most: int) -> Iterable[int]:
    """Up to `most` of the numbers below `count`, the first and the last among them."""
    if count <= most:
        return range(count)
    return sorted({place * (count - 1) // (most - 1) for place in range(most)})


def _hash(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]
