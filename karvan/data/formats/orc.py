"""ORC files. Groups are stripes, each of which is decoded completely.

The format has no checksums: damage is detected where it breaks the encoding or the counts of records, which
is more likely in compressed files. In numbers the ORC library detects it by itself; strings, lists and other
types with lengths in the file can crash it, and are decoded in another process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc, orc, types

from karvan.data.errors import DataError
from karvan.data.formats.base import (
    FileSource,
    Layout,
    check_decoded,
    most_decoded,
    too_large,
    varint,
    write_at,
)

# The stripes of an ORC file, read from its tail.
#
# The tail is a protobuf message; https://orc.apache.org/specification/ORCv1 has its fields. It is checked
# before pyarrow builds a schema of it, since damaged types can crash the process.


_DECIMAL, _MOST_DIGITS = 14, 38


@dataclass(frozen=True, slots=True)
class Stripe:
    """How many records a stripe has, and its first and last byte; `tail` is where the file's tail begins."""

    records: int
    begin: int
    end: int
    tail: int

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin


def stripes(opened: orc.ORCFile, size: int) -> list[Stripe]:
    """The stripes of a file of `size` bytes; raises a ValueError if they are inconsistent."""
    message = bytes(opened.reader.serialized_file_tail())
    footers = _parts(message, 2)
    for type_ in (type_ for footer in footers for type_ in _parts(footer, 4)):
        if _number(type_, 1) == _DECIMAL and _number(type_, 5) > _MOST_DIGITS:
            raise ValueError(f"A decimal has {_number(type_, 5)} digits, but {_MOST_DIGITS} are the most.")
    stripes_of_file = []
    for stripe in (stripe for footer in footers for stripe in _parts(footer, 3)):
        begin = _number(stripe, 1)
        end = begin + sum(_number(stripe, part) for part in (2, 3, 4))  # index, data, footer
        stripes_of_file.append((_number(stripe, 5), begin, end))
    tail = max((end for _, _, end in stripes_of_file), default=0)
    records = sum(count for count, _, _ in stripes_of_file)
    if len(stripes_of_file) != opened.nstripes or records != opened.nrows:
        raise ValueError(
            f"The footer counts {opened.nrows} records in {opened.nstripes} stripes, "
            f"but lists {records} in {len(stripes_of_file)}."
        )
    if tail > size:
        raise ValueError(f"The footer lists a stripe up to byte {tail}, but the file has {size}.")
    return [Stripe(*fields, tail) for fields in stripes_of_file]


def _parts(message: bytes, field: int) -> list[bytes]:
    """The values of a repeated field that are messages themselves."""
    return [value for number, value in _fields(message) if number == field and isinstance(value, bytes)]


def _number(message: bytes, field: int) -> int:
    """The value of a field that is a number; 0 where it is missing."""
    values = [value for number, value in _fields(message) if number == field and isinstance(value, int)]
    return values[-1] if values else 0


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """All fields of a message: number and value."""
    at = 0
    while at < len(message):
        tag, at = _number_at(message, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _number_at(message, at)
        elif kind == 2:
            size, at = _number_at(message, at)
            value, at = message[at : at + size], at + size
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = message[at : at + size], at + size
        else:
            raise ValueError("The footer cannot be read.")
        yield tag >> 3, value


def _number_at(message: bytes, at: int) -> tuple[int, int]:
    try:
        return varint(message, at)
    except (IndexError, OverflowError):
        raise ValueError("The footer ends too early.") from None


# Decodes ORC stripes in a child process, so that a crash of the ORC library is only an error.
#
# The library trusts the lengths of strings, lists and maps that a stripe holds: damaged ones make it request
# huge amounts of memory and write outside of its buffers. So such columns are decoded by a small program
# (`orc_process.py`), with bounds on its memory and time:
#
# ```
#  this process                                                       the child
#  the stripe, and the file's tail, at same offsets ──► file in memory ──► ORC library
#  RecordBatch ◄── copy ◄────────────────────────────── file in memory ◄── Arrow IPC
# ```
#
# The child reads nothing else, so the file may be on any file system. There are as many children as threads
# that decode at the same time, and they are reused for the next stripe. They end when this process does,
# however it ends, since their input ends with it, and after half a minute without work. A child that has
# ended by itself is replaced; if one crashes while decoding a stripe, an `OSError` states the cause.


_PROGRAM = Path(__file__).with_name("orc_process.py")
_MAGIC = 3  # bytes at the beginning, which identify old versions
_MEMORY, _COPIES = 512 << 20, 4  # of the program, and of what it decodes, which grows by doubling
_SECONDS, _BYTES_PER_SECOND = 60, 1 << 20
_IDLE_SECONDS = 30


def decode_in_child(
    file: pa.NativeFile, number: int, stripe: Stripe, columns: Sequence[str]
) -> pa.RecordBatch:
    """Columns of a stripe of the open `file`, decoded in a child process."""
    most = most_decoded(stripe.size)
    request = {
        "stripe": number,
        "columns": list(columns),
        "bytes": _MEMORY + _COPIES * most,
        "most": most,
        "seconds": _SECONDS + stripe.size // _BYTES_PER_SECOND,
    }
    answer = None
    while answer is None:
        try:
            child = _idle.pop()
        except IndexError:
            child = _Child()
        try:
            answer = child.ask(file, stripe, request)
        except BaseException:
            child.close()
            raise
    _idle.append(child)
    if isinstance(answer, str):
        raise OSError(answer)
    # The offsets come from a process whose memory may have been corrupted.
    answer.validate(full=True)
    return answer


class _Child:
    """A running decoder, and the two files that are shared with it."""

    def __init__(self) -> None:
        self._file, self._result = (
            FileIO(os.memfd_create(name), "r+") for name in ("orc-file", "orc-result")
        )
        shared = [self._file.fileno(), self._result.fileno()]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), *map(str, [*shared, _IDLE_SECONDS])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=shared,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def ask(
        self, file: pa.NativeFile, stripe: Stripe, request: dict[str, Any]
    ) -> pa.RecordBatch | str | None:
        """The decoded stripe, or the library's error, or None if the child had ended before."""
        size = file.size()
        self._file.truncate(size)
        for begin, end in [(0, _MAGIC), (stripe.begin, stripe.end), (stripe.tail, size)]:
            write_at(self._file, file.read_at(end - begin, begin), begin)
        answer = self._exchange(request)
        self._file.truncate(0)
        if answer is None:
            self.close()
            return None
        if answer.get("too large"):
            raise DataError(too_large(stripe.size, answer["too large"]))
        if "error" in answer:
            return str(answer["error"])
        batch = _read(self._result, answer["size"])
        self._result.truncate(0)
        return batch

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.wait()
        if status == 0:
            return None
        if status > 0:
            raise OSError(f"The process that decodes ORC has ended with status {status}.")
        cause, columns = signal.Signals(-status).name, ", ".join(request["columns"])
        raise OSError(
            f"Decoding {columns} crashes the ORC library ({cause}): the file is damaged or too large."
        )

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process:
            pass
        self._file.close()
        self._result.close()


def _read(file: FileIO, size: int) -> pa.RecordBatch:
    buffer = pa.allocate_buffer(size)
    view = memoryview(buffer)
    at = 0
    while at < size:
        at += os.preadv(file.fileno(), [view[at:]], at)
    return ipc.open_stream(buffer).read_next_batch()


# Lists are safe to push to and pop from on any thread.
_idle: list[_Child] = []


@atexit.register
def _close_all() -> None:
    while _idle:
        _idle.pop().close()


# After a fork, the children still belong to the process that started them.
os.register_at_fork(after_in_child=_idle.clear)


class OrcSource(FileSource):
    """ORC files; counts come from their footers."""

    group_name = "stripe"

    def _inspect(self, path: str, file: pa.NativeFile) -> Layout:
        opened = orc.ORCFile(file)
        stripes_of_file = stripes(opened, file.size())
        return Layout(
            opened.schema, np.cumsum([0, *(stripe.records for stripe in stripes_of_file)]), stripes_of_file
        )

    def _groups(
        self, path: str, layout: Layout, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        numbers = [name for name in columns if _is_number(layout.schema.field(name).type)]
        row = sum(_width(layout.schema.field(name).type) for name in columns)
        stripes_of_file: list[Stripe] = layout.detail
        with self._open(path) as file:
            opened = orc.ORCFile(file)
            for number, stripe in enumerate(stripes_of_file[group:], group):
                check_decoded(stripe.records * row, stripe.size)
                # Memory for all records is allocated at once, so their number must be plausible.
                local = numbers if stripe.records <= stripe.size else []
                isolated = [name for name in columns if name not in local]
                pieces = [opened.read_stripe(number, local)] if local else []
                if isolated or not local:
                    pieces.append(decode_in_child(file, number, stripe, isolated))
                yield number, _side_by_side(pieces)


def _side_by_side(pieces: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    names = [name for piece in pieces for name in piece.schema.names]
    return pa.RecordBatch.from_arrays([column for piece in pieces for column in piece.columns], names)


def _is_number(type_: pa.DataType) -> bool:
    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))


def _width(type_: pa.DataType) -> int:
    """How many bytes of a value its type declares; texts and lists have at least an offset."""
    return max(type_.bit_width // 8, 1) if _is_number(type_) else 4
