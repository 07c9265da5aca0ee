"""What all work on a device shares: block shapes, working memory, streams, and small transfers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.devices import allocations_of
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.kernels.fields import read_numbers

_BLOCK = fields.BLOCK.value
_ALIGN = 64  # elements: the start of every slice is aligned alike, so kernels are compiled once


def power(count: int) -> int:
    """The least power of two that is at least `count`, and 2."""
    return max(2, 1 << max(0, count - 1).bit_length())


def blocks(count: int) -> tuple[int]:
    """A grid for so many items, of which a program has a block."""
    return (max(1, -(-count // _BLOCK)),)


def coarse(count: int) -> int:
    """A number of blocks that is at least `count` and one of few: sizes that vary a little become equal."""
    if count <= 8:
        return count
    unit = 1 << (count.bit_length() - 4)
    return -(-count // unit) * unit


def tile(columns: int, most: int = 1024) -> dict[str, int]:
    """Rows of a block with so many columns and at most so many elements, and the warps that work on it."""
    rows = max(1, min(64, most // columns))
    return {"GROUP": rows, "num_warps": max(1, min(8, rows * columns // 512))}


def arrays(dtype: torch.dtype, device: torch.device, sizes: Sequence[int]) -> list[Tensor]:
    """Arrays in one allocation, which takes less of the host's time than one for each; with any content."""
    ends = list(accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes))
    memory = torch.empty(max(1, ends[-1]), dtype=dtype, device=device)
    return [memory[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]


@contextmanager
def beside(stream: torch.cuda.Stream | None, shared: Sequence[Tensor]) -> Iterator[None]:
    """Queue work beside the current stream, after what is queued there now; it uses the memory `shared`.

    Without a stream, work is queued as usual.
    """
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    if not torch.cuda.is_current_stream_capturing():  # what a graph uses stays
        for tensor in shared:
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


class Handover:
    """What was queued on the current stream, with its memory, for another stream that uses it."""

    def __init__(self, device: torch.device, tensors: Iterable[Tensor | None]) -> None:
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            self._ready = self._stream.record_event()
            self._used = allocations_of(tensor for tensor in tensors if tensor is not None)

    def receive(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream, or the current one, wait for the work, and the memory for the stream."""
        if self._ready is None:
            return
        stream = stream or torch.cuda.current_stream(self._stream.device)
        if stream != self._stream:
            stream.wait_event(self._ready)
            for tensor in self._used:
                tensor.record_stream(stream)


def update_tile(columns: int, long: bool = False) -> dict[str, int]:
    """Of an update: rows of a block, gradients of a row that are read together, and warps.

    long: of long runs, which have many pieces each: fewer rows, and more pieces together. A block of many
    such rows would wait for the longest one, and Triton 3.6 does not compile it.
    """
    rows = max(1, min(64, 512 // columns))
    warps = max(1, min(8, rows * columns // 128))
    if long:
        return {"GROUP": max(1, rows // 8), "TOGETHER": max(1, min(16, 4096 // columns)), "num_warps": warps}
    return {"GROUP": rows, "TOGETHER": 2 if columns <= 512 else 1, "num_warps": warps}


def join(stream: torch.cuda.Stream | None) -> None:
    """Let the current stream wait for what is queued beside it."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


# Triton's interpreter, in which the kernels of a store on "cpu" run: threads launch one kernel at a time.


_patching = threading.Lock()
_launching = threading.RLock()
_takes_turns = False


def take_turns() -> None:
    """Have threads wait for each other: the interpreter has one state, the current program, for all of them.

    A GPU needs no such thing. There is nothing to set in the interpreter, so its launch is replaced.
    """
    from triton.runtime import interpreter  # not needed on a GPU

    global _takes_turns
    with _patching:
        if _takes_turns:
            return
        _takes_turns = True
        run = interpreter.GridExecutor.__call__

        def run_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _launching:
                return run(self, *args, **kwargs)

        interpreter.GridExecutor.__call__ = run_alone


# `DeviceStreams`: the streams of a store on a GPU, each created once.
#
# torch has 32 streams of each priority and gives them out in turn. If a store created them as it needs them,
# a stream on which a graph is being recorded could be one on which another thread copies rows.


class DeviceStreams:
    """The streams of a store; all are None for a store on "cpu", where kernels run when they are queued."""

    def __init__(self, device: torch.device) -> None:
        self.side = _stream(device, priority=-1)
        """For small kernels beside large ones, which must not wait until all of their programs have begun."""
        self.gathers = _stream(device, priority=-1)
        """For the rows that captures read: training waits for these kernels."""
        self.copies = _stream(device)
        """For copies of rows to the host."""
        self.recording = _stream(device)
        """For work that is recorded into graphs."""

    def refuse_graph(self) -> None:
        """Raise if the program is recording a CUDA graph of its own on the current stream."""
        if self.recording is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Tables on a GPU cannot be looked up or updated while the program records a CUDA graph: its "
                "replays would not reserve memory for new rows. Record the dense part only; lookups and "
                "updates of batches of the same shape are replayed as graphs of the store's own."
            )


def _stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


# Small transfers between host and device that neither side waits for.
#
# `Uploads` copies numbers to the device from a ring of page-locked memory. `Counters` are numbers that
# kernels write: the host learns them some steps later (`poll`), or waits for them (`read`).


_RING = 32  # uploads in flight; the next one waits for the oldest
_READ = 512  # numbers of a program that reads those of a graph
_NUMBERS = 1024  # of an upload, as a rule
_COPIES = 2  # of counters, in flight


class Staging:
    """Page-locked memory from which a graph copies numbers to a tensor on the device, at each replay."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._pinned = torch.empty(target.numel(), dtype=torch.int64, pin_memory=True)
        self._numbers = self._pinned.numpy()
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.copy()  # loads the kernel, which must not happen while a graph is recorded

    def numbers(self) -> NDArray[np.int64]:
        """The numbers that the next replay copies, once the last one has copied them."""
        self.done.synchronize()
        return self._numbers

    def copy(self) -> None:
        """Queue the copy; recorded in a graph."""
        size = self._target.numel()
        read_numbers[(-(-size // _READ),)](
            self._pinned.data_ptr(), self._target, size, SIZE=_READ, num_warps=4
        )


class Uploads:
    """Copies arrays of int64 to a device.

    The page-locked memory is allocated at once: each allocation may wait for the work of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: deque[_Upload] = deque()
        if device.type == "cuda":
            memory = torch.empty(_RING * _NUMBERS, dtype=torch.int64, pin_memory=True)
            self._ring.extend(map(_upload_from, memory.view(_RING, _NUMBERS).unbind()))

    def send(self, numbers: NDArray[np.int64]) -> Tensor:
        """The numbers on the device, for work that is queued from now on."""
        sent = torch.empty(numbers.size, dtype=torch.int64, device=self._device)
        self.send_to(sent, numbers)
        return sent

    def send_to(self, target: Tensor, numbers: NDArray[np.int64]) -> None:
        """Copy numbers to the beginning of a tensor on the device."""
        size = numbers.size
        if self._device.type != "cuda":
            target[:size] = torch.from_numpy(numbers.reshape(-1))
            return
        upload = self._ring.popleft()
        try:
            upload.done.synchronize()
            if len(upload.numbers) < size:
                capacity = 1 << (size - 1).bit_length()
                upload = _upload_from(torch.empty(capacity, dtype=torch.int64, pin_memory=True))
            upload.numbers[:size] = numbers.reshape(-1)
            target[:size].copy_(upload.memory[:size], non_blocking=True)
            upload.done.record()
        finally:
            self._ring.append(upload)


class _Upload(NamedTuple):
    memory: Tensor
    numbers: NDArray[np.int64]  # the same
    done: torch.cuda.Event


def _upload_from(memory: Tensor) -> _Upload:
    return _Upload(memory, memory.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]


class _Copy(NamedTuple):
    numbers: Tensor
    read: NDArray[np.int64]  # the same, as the host reads it
    event: torch.cuda.Event
    time: int
    spare: bool  # whether its memory can be used for another copy


class Counters:
    """A block of int64 numbers in device memory. `time` counts the copies that were requested."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device = device
        self.values = torch.zeros(size, dtype=torch.int64, device=device)
        self.time = 0
        self._copies: deque[_Copy] = deque()
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []
        self._known = np.zeros(size, np.int64)
        self.known_time = 0

    def resize(self, size: int) -> None:
        """Make room for more numbers; pointers to the old ones are not valid any more."""
        larger = torch.zeros(size, dtype=torch.int64, device=self.device)
        larger[: self.values.numel()] = self.values
        self.values = larger
        self._copies.clear()
        self._spare.clear()
        self._known = np.concatenate([self._known, np.zeros(size - len(self._known), np.int64)])

    def request(self) -> int:
        """Copy the numbers to the host when the queued work is done; returns the time of this copy."""
        self.time += 1
        if self.device.type != "cuda":
            self._known, self.known_time = self.values.numpy().copy(), self.time
            return self.time
        if self._spare:
            numbers, event = self._spare.pop()
        else:
            numbers = torch.empty(self.values.numel(), dtype=torch.int64, pin_memory=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        numbers.copy_(self.values, non_blocking=True)
        event.record()
        self._copies.append(_Copy(numbers, numbers.numpy(), event, self.time, spare=True))
        return self.time

    def note_copy(self, numbers: Tensor, read: NDArray[np.int64], event: torch.cuda.Event) -> None:
        """A graph that was just replayed copies the numbers to the host, before the event."""
        self.time += 1
        self._copies.append(_Copy(numbers, read, event, self.time, spare=False))

    def request_if_idle(self) -> None:
        """The same, unless enough copies are on their way."""
        if len(self._copies) < _COPIES:
            self.request()

    def poll(self) -> NDArray[np.int64]:
        """The numbers of the newest copy that has arrived, which is that of `known_time`."""
        newest = None
        while self._copies and self._copies[0].event.query():  # type: ignore[no-untyped-call]
            self._reuse(newest)
            newest = self._copies.popleft()
        if newest is not None:
            self._known[:] = newest.read
            self.known_time = newest.time
            self._reuse(newest)
        return self._known

    def _reuse(self, copy: _Copy | None) -> None:
        if copy is not None and copy.spare:
            self._spare.append((copy.numbers, copy.event))

    def catch_up(self) -> None:
        """Wait until the copies that were requested have arrived; later work stays in the queue."""
        if self._copies:
            self._copies[-1].event.synchronize()

    def read(self) -> NDArray[np.int64]:
        """The numbers now; waits for the device."""
        self.request()
        self.catch_up()
        return self.poll()
