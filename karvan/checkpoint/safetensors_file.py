"""A file of named arrays in the safetensors layout: written without copies, fully validated when read.

The layout: eight bytes with the header's length, a JSON header padded so that the data starts at a multiple
of 64, then the arrays one after the other. It is written without the safetensors library, so that arrays are
written from their memory without a copy, and the checksum is computed on the way. Any safetensors reader
opens these files.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from karvan.activity import activity
from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError
from karvan.checkpoint.files import opened, write_object
from karvan.errors import is_temporary
from karvan.job.checkpoint_url import url_of
from karvan.native import _native
from karvan.threads import cores

# Limits how much of the machine a save takes while training continues.


# The share of one core that a save may use, for each core of the machine. A step waits for the slowest of its
# threads, so a save that takes a tenth of one core costs about as much as one that takes a tenth of all.
_SHARE = 0.06


class Throttle:
    """Work in turns, each followed by a pause that leaves the cores to training.

    When somebody waits for the save, the cores have nothing else to do: `hurry` ends pauses and turns.
    """

    def __init__(self, share: float | None = None) -> None:
        self._share = min(1.0, _SHARE * cores()) if share is None else share
        self._hurried = threading.Event()
        self._turn = threading.Lock()

    def hurry(self) -> None:
        """Continue without pauses."""
        self._hurried.set()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a piece of work."""
        activity.advance()
        if self._in_a_hurry():
            yield
            return
        with self._turn:
            start = time.thread_time()
            yield
            worked = time.thread_time() - start
            if not self._in_a_hurry():
                self._hurried.wait(worked * (1 / self._share - 1))

    def _in_a_hurry(self) -> bool:
        # A program whose main thread has ended waits for the save, too.
        return self._share >= 1 or self._hurried.is_set() or not threading.main_thread().is_alive()


Bytes = NDArray[np.uint8]

# The types of arrays, by their names in safetensors.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
_ALIGNMENT = 64
_PIECE = 4 << 20  # bytes of a system call: small enough to be in the cache after the checksum was computed
_MAX_HEADER = 100_000_000  # as in the safetensors library
# The system's errors for a file that is lost or broken. Other errors, such as a lack of permission or a
# server that cannot be reached, say nothing about the file.
_LOST = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EBADMSG),
    errno.ENODATA,
)


class Stored(NamedTuple):
    """An array as it is stored in a file."""

    dtype: str  # its name in safetensors
    shape: tuple[int, ...]
    data: Bytes


class FilePosition(NamedTuple):
    """The position of an array in a file: `begin` counts from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True)
class FileEntry:
    """A file as the manifest lists it."""

    name: str  # relative to the checkpoint's folder
    bytes: int
    checksum: str


def checksum_text(crc: int) -> str:
    """A checksum as text."""
    return f"crc32:{crc:08x}"


def stored(array: NDArray[Any], dtype: str | None = None) -> Stored:
    """An array as it will be stored in the file; `dtype` if numpy has no name for it."""
    array = np.ascontiguousarray(array)
    name = dtype or f"{'F' if array.dtype.kind == 'f' else array.dtype.kind.upper()}{8 * array.itemsize}"
    if name not in ITEM_BYTES:
        raise TypeError(f"Expected an array of a dtype that safetensors supports, got {array.dtype}.")
    return Stored(name, array.shape, array.reshape(-1).view(np.uint8))


def write_arrays(folder: Path, name: str, arrays: Mapping[str, Stored], pace: Throttle) -> FileEntry:
    """Write a new file and wait until it is on the disk. The arrays are stored in the given order."""
    header: dict[str, Any] = {}
    at = 0
    for key, array in arrays.items():
        header[key] = {"dtype": array.dtype, "shape": array.shape, "data_offsets": (at, at + len(array.data))}
        at += len(array.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    buffers = [memoryview(struct.pack("<Q", len(text)) + text)]
    buffers += [array.data.data for array in arrays.values()]
    return FileEntry(name, *write_file(folder / name, buffers, pace))


def write_file(path: Path, buffers: Iterable[memoryview], pace: Throttle) -> tuple[int, str]:
    """Write a new file and wait until it is on the disk; returns its size and checksum."""
    crc = size = 0
    file = -1

    def written() -> Iterator[list[memoryview]]:
        """The pieces, after their checksum was computed and, on a disk, they were written."""
        nonlocal crc, size
        for pieces in _groups(buffers):
            with pace.turn():
                for piece in pieces:
                    crc = _native.crc32(piece, crc)
                    size += len(piece)
                if file >= 0:
                    _write_all(file, pieces)
            yield pieces

    if url_of(path) is not None:
        write_object(path, written())
        return size, checksum_text(crc)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for _ in written():
            pass
        os.fsync(file)
    finally:
        os.close(file)
    return size, checksum_text(crc)


def _groups(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Pieces of the buffers, some megabytes at a time."""
    group: list[memoryview] = []
    size = 0
    for buffer in buffers:
        for begin in range(0, len(buffer), _PIECE):
            group.append(buffer[begin : begin + _PIECE])
            size += len(group[-1])
            if size >= _PIECE or len(group) == 512:  # the system takes 1024 at once
                yield group
                group, size = [], 0
    yield group


def _write_all(file: int, pieces: Sequence[memoryview]) -> None:
    remaining = list(pieces)
    while remaining:
        written = os.writev(file, remaining)
        while remaining and written >= len(remaining[0]):
            written -= len(remaining.pop(0))
        if remaining:
            remaining[0] = remaining[0][written:]


WRITERS = 3  # threads of a process that write files, unless the user says how many
MOST_WRITERS = 256
WriteArrays: TypeAlias = Callable[[Path, str, Mapping[str, Stored], Throttle], FileEntry]


class Writers:
    """Threads that write files while the next ones are prepared; few files wait, so memory is bounded.

    All start at once: an interpreter that is about to end does not start threads any more.
    """

    def __init__(
        self, count: int = WRITERS, pace: Throttle | None = None, write: WriteArrays | None = None
    ) -> None:
        self.pace = pace or Throttle()
        self._write = write
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, name="karvan-write") for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error
            del job

    def write(
        self, note: Callable[[FileEntry], None], folder: Path, name: str, arrays: Mapping[str, Stored]
    ) -> None:
        """Queue a file, whose entry `note` gets; raises the exception of an earlier one."""
        if self._error is not None:
            raise self._error
        self._jobs.put(lambda: note((self._write or write_arrays)(folder, name, arrays, self.pace)))

    def end(self) -> None:
        """Wait for all jobs and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def finish(self) -> None:
        """End, and raise the exception of a failed job."""
        self.end()
        if self._error is not None:
            raise self._error


class Damage(NamedTuple):
    """A file that is not as its checkpoint's manifest says.

    Attributes:
        path: The file.
        problem: What is wrong.
        unread: Whether the system did not let us read it: it may be intact.
        temporary: Whether it could not be read because of an outage.

    Example:
        >>> engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
        >>> checkpoint = kv.checkpoint.save("one", {}, engine)
        >>> checkpoint.verify()
        []
    """

    path: Path
    problem: str
    unread: bool = False  # the system did not let us read it: it may be intact
    temporary: bool = False  # because of an outage


def damage_of(folder: Path, entry: FileEntry) -> Damage | None:
    """What is wrong with a file, by its size and checksum; None if nothing is."""
    path = folder / entry.name
    try:
        with opened(path) as (file, size):
            if size != entry.bytes:
                return Damage(path, f"expected {entry.bytes} bytes, got {size}")
            crc = 0
            buffer = memoryview(bytearray(min(_PIECE, size)))
            while count := file.readinto(buffer):
                crc = _native.crc32(buffer[:count], crc)
    except OSError as error:
        text = f"expected a file of {entry.bytes} bytes, got {error.strerror or error}"
        return Damage(path, text, error.errno not in _LOST, is_temporary(error))
    if checksum_text(crc) != entry.checksum:
        return Damage(path, f"expected {entry.checksum}, got {checksum_text(crc)}")
    return None


def unread_error(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that cannot be read."""
    text = f"expected a file that can be read, got {error.strerror or error}."
    if error.errno in _LOST:
        return DamagedCheckpointError(path, text)
    return CheckpointError(path, text, temporary=is_temporary(error))


def read_header(path: Path) -> dict[str, FilePosition]:
    """The positions of a file's arrays; everything in the header is checked."""
    try:
        with opened(path) as (file, size):
            start = file.read(8)
            if len(start) < 8:
                raise DamagedCheckpointError.mismatch(path, "at least 8 bytes", len(start))
            (length,) = struct.unpack("<Q", start)
            if length > min(_MAX_HEADER, size - 8):
                raise DamagedCheckpointError.mismatch(
                    path, f"a header within {size} bytes", f"one of {length}"
                )
            text = file.read(length)
    except OSError as error:
        raise unread_error(path, error) from error
    try:
        header = json.loads(text)
    except ValueError as error:
        raise DamagedCheckpointError.mismatch(path, "a header of JSON", f"'{error}'") from error
    if not isinstance(header, dict):
        raise DamagedCheckpointError.mismatch(
            path, "a header that is an object", f"a {type(header).__name__}"
        )
    header.pop("__metadata__", None)
    positions = {name: _position(path, name, entry, 8 + length) for name, entry in header.items()}
    at = 8 + length
    for name, position in sorted(positions.items(), key=lambda item: (item[1].begin, item[1].size)):
        if position.begin != at:
            raise DamagedCheckpointError.mismatch(path, f"array '{name}' at byte {at}", position.begin)
        at += position.size
    if at != size:
        raise DamagedCheckpointError.mismatch(path, f"{at} bytes, as the header says", size)
    return positions


def _position(path: Path, name: str, entry: object, data: int) -> FilePosition:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            sizes = tuple(n for n in shape if isinstance(n, int) and n >= 0)
            if dtype in ITEM_BYTES and len(sizes) == len(shape):
                if end - begin != prod(sizes) * ITEM_BYTES[dtype] or begin < 0:
                    raise DamagedCheckpointError.mismatch(
                        path, f"array '{name}' of {prod(sizes) * ITEM_BYTES[dtype]} bytes", end - begin
                    )
                return FilePosition(dtype, sizes, data + begin, end - begin)
    raise DamagedCheckpointError.mismatch(
        path, f"array '{name}' with a known dtype, a shape and offsets", entry
    )


def read_arrays(folder: Path, entry: FileEntry) -> dict[str, Stored]:
    """All arrays of a file, each with its own memory, once the checksum is verified."""
    path = folder / entry.name
    positions = sorted(read_header(path).items(), key=lambda item: (item[1].begin, item[1].size))
    tensors: dict[str, Stored] = {}
    try:
        with opened(path) as (file, size):
            crc = _native.crc32(_read_bytes(path, file, positions[0][1].begin if positions else size), 0)
            for name, position in positions:
                data = _read_bytes(path, file, position.size)
                crc = _native.crc32(data, crc)
                tensors[name] = Stored(position.dtype, position.shape, data)
    except OSError as error:
        raise unread_error(path, error) from error
    if checksum_text(crc) != entry.checksum:
        raise DamagedCheckpointError.mismatch(path, entry.checksum, checksum_text(crc))
    return tensors


def _read_bytes(path: Path, file: Any, size: int) -> Bytes:
    data = np.empty(size, np.uint8)
    view, at = data.data, 0
    while at < size:
        count = file.readinto(view[at:])
        if not count:
            raise DamagedCheckpointError.mismatch(path, f"{size} more bytes", at)
        at += count
    return data
