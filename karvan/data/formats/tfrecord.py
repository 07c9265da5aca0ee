"""TFRecord, TensorFlow's files of records: read and written without TensorFlow.

    record = u64 length, u32 masked CRC-32C of the length, data, u32 masked CRC-32C of the data

All numbers are little-endian; a checksum is masked by rotating it right by 15 bits and adding 0xA282EAD8.
There is no header, no footer and no count, so a file that ends between two records looks complete; anything
else that is cut off or changed is an error. A file may be compressed as a whole, with
gzip or zlib.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import fs

from karvan.data.errors import DataError
from karvan.data.formats.paths import PathLike
from karvan.data.formats.record_files import (
    RUN,
    ByteStream,
    Index,
    RecordFileWriter,
    RecordSource,
    check_record,
)
from karvan.data.formats.tf_example import Bytes, Payloads, Places
from karvan.native import _native

_HEAD = 12
_CUT_OFF = "The record is cut off: the file ends before it does."
_FAULTS = {
    "length": "The length of the record does not match its checksum: the file is damaged.",
    "data": "The data of the record does not match its checksum: the file is damaged.",
}


def is_tfrecord(start: bytes) -> bool:
    """Whether bytes begin with the length of a record and its checksum."""
    return len(start) >= _HEAD and _native.masked_crc32c(start[:8]) == int.from_bytes(start[8:12], "little")


class TFRecordSource(RecordSource):
    """TFRecord files; see `RecordSource` for what the records may hold."""

    format_name = "TFRecord"

    def _is_plain(self, start: bytes) -> bool:
        return is_tfrecord(start)

    def _find_runs(self, file: pa.NativeFile) -> Index:
        size = file.size()
        bounds, starts = [0], [0]
        while bounds[-1] < size:
            file.seek(bounds[-1])
            # Data is not checked, so the last record of a block need not be in it completely.
            records, _, end, fault = _native.find_tfrecords(file.read(RUN), False)
            if fault or not len(records) or bounds[-1] + end > size:
                intact = len(records) if fault or not len(records) else len(records) - 1
                at = end if intact == len(records) else int(records[-1]) - _HEAD
                raise DataError(
                    _FAULTS.get(fault, _CUT_OFF), place=_place(starts[-1] + intact, bounds[-1] + at)
                )
            bounds.append(bounds[-1] + end)
            starts.append(starts[-1] + len(records))
        return Index(np.array(bounds, np.int64), np.array(starts, np.int64))

    def _read_run(self, data: bytes, at: int, first: int) -> Iterator[Payloads]:
        yield _records(data, at, first, is_all=True)[0]

    def _scan(self, stream: ByteStream) -> Iterator[Payloads]:
        rest, at, first, block = b"", 0, 0, RUN
        while True:
            more = stream.read(block)
            data = rest + more
            is_all = len(more) < block
            records, end = _records(data, at, first, is_all, " of the data before compression")
            if len(records):
                yield records
            if is_all:
                return
            if len(data) - end >= _HEAD:  # an incomplete record, whose length matches its checksum
                length = int.from_bytes(data[end : end + 8], "little")
                check_record(length, _place(first + len(records), at + end))
            rest, at, first = data[end:], at + end, first + len(records)
            # A record that is larger than a run is read in steps that double: its length may be wrong.
            block = RUN if len(records) else max(RUN, len(rest))


class TFRecordWriter(RecordFileWriter):
    """Write a TFRecord file.

    `write` takes bytes; `write_rows` takes tables, and their rows become tf.Example records. Use it in a
    `with` block: the file appears when it ends without an error.

    Args:
        path: The file.
        compression: "gzip", "zlib" or "none"; by default gzip if the name ends in `.gz`.
        filesystem: A pyarrow file system that gets the file.

    Raises:
        ValueError: The compression is unknown.

    Example:
        >>> import pyarrow as pa
        >>> with kv.data.TFRecordWriter("clicks.tfrecord") as writer:
        ...     writer.write_rows(pa.table({"user": [7, 8]}))
    """

    def __init__(
        self, path: PathLike, compression: str | None = None, filesystem: fs.FileSystem | None = None
    ) -> None:
        if compression not in (None, "gzip", "zlib", "none"):
            raise ValueError(f"compression must be 'gzip', 'zlib' or 'none', but is {compression!r}.")
        if compression is None:
            compression = "gzip" if str(path).lower().endswith(".gz") else "none"
        super().__init__(path, filesystem, None if compression == "none" else compression, RUN)

    def _frame(self, data: Bytes, bounds: Places) -> bytes:
        if self._is_deflated:
            check_record(int(np.diff(bounds).max(initial=0)))
        return bytes(_native.frame_tfrecords(data, bounds))


def _records(data: bytes, at: int, first: int, is_all: bool, of: str = "") -> tuple[Payloads, int]:
    """The records in some bytes, and where they end; is_all: the last one must be complete."""
    starts, lengths, end, fault = _native.find_tfrecords(data, True)
    if fault or (is_all and end != len(data)):
        raise DataError(_FAULTS.get(fault, _CUT_OFF), place=_place(first + len(starts), at + end) + of)
    return Payloads(np.frombuffer(data, np.uint8), starts, lengths, first), end


def _place(record: int, byte: int) -> str:
    return f"record {record}, byte {byte}"
