"""`Identity`: distinguishes data sets, for example yesterday's from today's.

The id is a hash of the parts' names, their numbers of records, and the content: all of it up to 64 MiB,
or blocks at equal distances if it is larger. So yesterday's `part-0.parquet` and
today's differ even if they have equally many records, and so does data before and after a correction. Names
of folders do not count, so that a data set may be moved, except for those of partitions, such as
`day=2026-01-31`.

Any data for `Trainer.fit` may have a method `identity()` that returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from karvan.data.errors import located
from karvan.data.source import Part, Source
from karvan.threads import map_on_threads

# Hashes of the content of data: of the bytes of files, and of the rows of tables in memory.
#
# Content up to a budget is hashed completely, so that one changed byte changes the hash. Of larger content,
# only blocks at equal distances over every file are hashed, both ends included: a change that is smaller than
# the distance between two blocks and does not shift what follows may be missed. `data_name` of a fit decides
# where that matters. Times are those of two busy cores.
#
# | where | budget | block | cost |
# |---|---|---|---|
# | local files | 64 MiB | 256 KiB | 0.13 s for 64 MiB, 0.2 s for more, if cached |
# | other file systems | 32 MiB | 2 MiB | 16 reads, and up to two for each of at most 64 files; 8 at a time |
# | tables in memory | 64 MiB | 1/256 of the budget | 0.2 s for 64 MiB, 0.3 s for more |


_TABLE_BUDGET = 1 << 26
_TABLE_BLOCKS = 256
_THREADS = 8
_READS_PER_TASK = 4  # each task opens its file once

Range = tuple[int, int]  # first byte, number of bytes


@dataclass(frozen=True)
class Budget:
    """How much of the files is read: bytes in total, bytes of a block, number of files."""

    total: int
    block: int
    files: int


_LOCAL = Budget(1 << 26, 1 << 18, 4096)
_REMOTE = Budget(1 << 25, 1 << 21, 64)  # few, large reads: each of them is a request


def fingerprint_files(filesystem: fs.FileSystem, paths: Sequence[str], budget: Budget | None = None) -> str:
    """A hash of the sizes of files and of their bytes, up to a budget.

    If there are more files than the budget allows, files at equal distances in the list are read, including
    the first and the last.
    """
    if budget is None:
        budget = _LOCAL if filesystem.type_name == "local" else _REMOTE
    sample = [paths[index] for index in spread(len(paths), budget.files)]
    sizes = [max(info.size or 0, 0) for info in filesystem.get_file_info(sample)]
    tasks = [
        (path, ranges[first : first + _READS_PER_TASK])
        for path, ranges in zip(sample, ranges_of(sizes, budget), strict=True)
        for first in range(0, len(ranges), _READS_PER_TASK)
    ]

    def read(task: tuple[str, list[Range]]) -> bytes:
        path, ranges = task
        with located(path), filesystem.open_input_file(path) as file:
            return b"".join(sha256(file.read_at(length, first)).digest() for first, length in ranges)

    digests = map_on_threads(read, tasks, _THREADS)
    return text_hash(f"{sizes} {[digest.hex() for digest in digests]}")


def ranges_of(sizes: Sequence[int], budget: Budget) -> list[list[Range]]:
    """Which bytes of files of these sizes are read; at least one range each, in order, none twice."""
    total = sum(sizes)
    ranges = []
    for size in sizes:
        count, block = -(-size // budget.block), budget.block
        if total > budget.total:
            share = budget.total * size // total
            count = max(2, share // budget.block)
            block = min(budget.block, max(1 << 12, share // 2))  # many small files: a little of each
        if count * block >= size:
            ranges.append([(at, min(block, size - at)) for at in range(0, max(size, 1), block)])
        else:
            ranges.append([(number * (size - block) // (count - 1), block) for number in range(count)])
    return ranges


def fingerprint_table(table: pa.Table, budget: int = _TABLE_BUDGET) -> str:
    """A hash of the columns and of their values, up to a budget; it does not depend on the chunks."""
    size = 1 << max(0, int(table.nbytes) - 1).bit_length()  # equal tables may differ by a few bytes
    digest = sha256(f"{table.schema.names} {table.num_rows}".encode())
    blocks = [(0, table.num_rows)]
    if size > budget:
        count = max(1, table.num_rows * budget // size // _TABLE_BLOCKS)
        total = min(_TABLE_BLOCKS, table.num_rows)
        blocks = [(number * (table.num_rows - count) // max(1, total - 1), count) for number in range(total)]
    for block in blocks:
        for column in table.slice(*block).columns:
            for piece in _pieces(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(array: Any) -> Iterator[Any]:
    """The bytes of an array's values, without the bytes under nulls or outside of a slice."""
    if isinstance(array, pa.ChunkedArray):  # too large for one array
        for chunk in array.chunks:
            yield from _pieces(chunk)
        return
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    yield f"{array.type} {len(array)} {array.null_count}".encode()
    if pa.types.is_null(array.type):
        return
    if array.null_count:
        yield np.packbits(array.is_valid().to_numpy(zero_copy_only=False))
        array = array.drop_null()
    kind = array.type
    if pa.types.is_boolean(kind):
        yield np.packbits(array.to_numpy(zero_copy_only=False))
    elif pa.types.is_struct(kind):
        for field in array.flatten():
            yield from _pieces(field)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        yield from _pieces(pc.list_value_length(array))
        yield from _pieces(array.flatten())
    elif kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
        yield from _pieces(pc.binary_length(array))
        _, offsets, values = array.buffers()
        wide = np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32
        if len(array) and values is not None:
            ends = np.frombuffer(offsets, wide)[[array.offset, array.offset + len(array)]]
            yield memoryview(values)[int(ends[0]) : int(ends[1])]
    elif pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind):
        width = kind.bit_width // 8
        values = array.buffers()[1]
        if len(array) and values is not None:
            yield memoryview(values)[array.offset * width : (array.offset + len(array)) * width]
    else:
        yield repr(array.to_pylist()).encode()


def spread(count: int, most: int) -> Sequence[int]:
    """Up to `most` of the numbers below `count`, the first and the last among them."""
    if count <= most:
        return range(count)
    return sorted({number * (count - 1) // (most - 1) for number in range(most)})


def text_hash(text: str) -> str:
    """A hash of 16 characters."""
    return sha256(text.encode()).hexdigest()[:16]


_FILES_LISTED = 1024


@dataclass(frozen=True)
class Identity:
    """What distinguishes data sets, for checkpoints.

    Args:
        id: Equal for the same data, and different for other data.
        label: A description for people.
        name: The name that `fit`, or a `Window`, gives it.
        files: A hash of each file's path and number of records, to count the files that two data sets share;
            empty if there are very many.
        grows: Whether records are only added at the end, as in a Kafka topic, so that a fit continues at its
            position.

    Example:
        >>> kv.data.Identity.named("monday").label
        'monday'
    """

    id: str
    label: str
    name: str | None = None
    files: tuple[str, ...] = ()
    grows: bool = False

    def state(self) -> dict[str, Any]:
        """Return its fields for JSON.

        Returns:
            The fields by name.
        """
        return {**vars(self), "files": list(self.files)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Identity:
        """Make the identity that `state` returned.

        Args:
            state: The fields.

        Returns:
            The identity.
        """
        return cls(**{**state, "files": tuple(state["files"])})

    @classmethod
    def named(cls, name: str, files: tuple[str, ...] = ()) -> Identity:
        """Make the identity of data with a name: the name alone decides, whatever the content.

        Args:
            name: The name.
            files: Hashes of its files.

        Returns:
            The identity.
        """
        return cls(f"name {name}", name, name, files)


def identity_of(source: Source) -> Identity:
    """The identity of a source's records."""
    parts = source.parts()
    digest = sha256()
    for part in parts:
        *folders, name = part.path.split("/")
        partitions = [folder for folder in folders if "=" in folder]  # other names of folders do not count
        digest.update(f"{'/'.join([*partitions, name])} {part.records}\n".encode())
    content: Callable[[], str] | None = getattr(source, "fingerprint", None)
    digest.update((content() if content else "\n".join(part.path for part in parts)).encode())
    return Identity(digest.hexdigest()[:16], _label(parts), files=files_of(source))


def files_of(source: Source) -> tuple[str, ...]:
    """Hash the name and length of every file, for `Identity.files`; no hashes for very many files."""
    parts = source.parts()
    return tuple(text_hash(f"{part.path} {part.records}") for part in parts if len(parts) <= _FILES_LISTED)


def _label(parts: Sequence[Part]) -> str:
    if not parts:
        return "no files"
    records = sum(part.records for part in parts)
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    return f"{parts[0].path}{more}, {records:,} records"
