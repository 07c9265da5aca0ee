"""`RecordFileWriter`: what the writers of TFRecord and RecordIO share.

A file of these formats that ends after any record, or chunk, looks complete. So that a failed writer does not
leave a shorter file, it writes to a hidden file next to it, which is renamed at the end; object stores show a
file only when it is closed anyway.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyarrow import fs

from karvan.data.formats.paths import PathLike, resolve
from karvan.data.formats.records import tf_example as examples
from karvan.data.formats.records.tf_example import Bytes, Places

_OBJECT_STORES = ("s3", "gcs", "abfs")
_WINDOW_BITS = {"gzip": 31, "zlib": 15}
_ROWS = 4096
_LARGEST = 1 << 31  # more than Arrow's bytes can hold


class RecordFileWriter(ABC):
    """Writes records in order. Use it in a `with` block: the file appears when it ends without an error."""

    def __init__(
        self, path: PathLike, filesystem: fs.FileSystem | None, compression: str | None, flush_bytes: int
    ) -> None:
        self._system, self._path = resolve(path, filesystem)
        folder, slash, name = self._path.rpartition("/")
        in_place = self._system.type_name in _OBJECT_STORES
        self._temporary_path = self._path if in_place else f"{folder}{slash}.{name}.unfinished"
        self._file = self._system.open_output_stream(self._temporary_path, compression=None)
        self._deflate: Any = None
        if compression is not None:
            self._deflate = zlib.compressobj(wbits=_WINDOW_BITS[compression])
        self._flush_bytes = flush_bytes
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0

    def write(self, record: bytes) -> None:
        """Append one record."""
        self._check(len(record))
        if self._buffered and self._buffered_bytes + len(record) > self._flush_bytes:
            self._flush()
        self._buffered.append(bytes(record))
        self._buffered_bytes += len(record)

    def write_rows(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Append rows as tf.Example records, one for each. Nulls are omitted; see `tf_example.py`."""
        self._flush()
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        for batch in table.to_batches(max_chunksize=_ROWS):
            data, bounds = examples.encode(batch)
            first = 0
            while first < batch.num_rows:
                end = int(np.searchsorted(bounds, bounds[first] + self._flush_bytes, side="right")) - 1
                end = min(max(end, first + 1), batch.num_rows)
                self._check(int(np.diff(bounds[first : end + 1]).max()))
                self._put(self._frame(data, bounds[first : end + 1]))
                first = end

    def close(self) -> None:
        """Write buffered records, and give the file its name."""
        if self._file.closed:
            return
        self._flush()
        if self._deflate is not None:
            self._file.write(self._deflate.flush())
        self._file.close()
        if self._temporary_path != self._path:
            self._system.move(self._temporary_path, self._path)

    def discard(self) -> None:
        """Stop writing, and remove the unfinished file."""
        if not self._file.closed:
            self._file.close()
            self._system.delete_file(self._temporary_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    @property
    def _is_deflated(self) -> bool:
        """Whether the file is compressed as a whole."""
        return self._deflate is not None

    @abstractmethod
    def _frame(self, data: Bytes, bounds: Places) -> bytes:
        """The bytes to write for records data[bounds[i]:bounds[i + 1]]."""

    def _check(self, size: int) -> None:
        """Raise if a record is too large."""
        if size >= _LARGEST:
            raise ValueError(f"A record must be smaller than 2 GiB, but has {size} bytes.")

    def _flush(self) -> None:
        if not self._buffered:
            return
        bounds = np.cumsum([0, *map(len, self._buffered)], dtype=np.int64)
        data = np.frombuffer(b"".join(self._buffered), np.uint8)
        self._buffered, self._buffered_bytes = [], 0
        self._put(self._frame(data, bounds))

    def _put(self, data: bytes) -> None:
        self._file.write(data if self._deflate is None else self._deflate.compress(data))
