"""Which device, and copies of a batch's columns to it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from karvan.distributed.connection import missing_cuda
from karvan.ragged import Batch, IdsReference, NestedRagged, Ragged

# A device by its name: an error where this machine does not have it.


def check_device(device: torch.device | str) -> torch.device:
    """The device; raises if this machine does not have it."""
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device expects "cpu", "cuda" or "cuda:1", got {device!r}.') from error
    if checked.type != "cuda":
        return checked
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r} expects a GPU and a torch that is built with CUDA, but "
            f"{missing_cuda()}: omit device, or use device='cpu'."
        )
    if checked.index is not None and checked.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device={str(device)!r} expects that GPU, but there are {count}, counted from 0.")
    return checked


def exact_device(device: torch.device | str) -> torch.device:
    """The device with its index; raises if this machine does not have it.

    With its index, because other threads have their own current GPU, by default the first.
    """
    checked = check_device(device)
    if checked.type == "cuda" and checked.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return checked


def data_device(device: torch.device | str | None) -> torch.device | None:
    """The GPU that batches of data go to, with its index; None if they stay on the CPU."""
    if device is None:
        return None
    exact = exact_device(device)
    if exact.type not in ("cpu", "cuda"):
        raise ValueError(f'Batches go to "cpu", "cuda" or a certain GPU, such as "cuda:1", got {device!r}.')
    return exact if exact.type == "cuda" else None


def require_cpu_batches(data: Any) -> None:
    """Raise if the batches of this data arrive on a GPU: they are to be sent to other processes."""
    device = getattr(data, "device", None)
    if isinstance(device, torch.device) and device.type != "cpu":
        raise ValueError(
            f"A loader sends its batches to trainers, so it expects them on the CPU, got data with device="
            f"'{device}': read it without device. A trainer can move them: "
            "kv.data.Stream(kv.data.from_loaders(), device=…)."
        )


# Copies of columns to a GPU: one large copy for all of a batch's columns, that no thread waits for.
#
# A batch has tens of columns of up to three tensors each. They are packed into one buffer in page-locked
# memory, which takes a single copy on the current stream; the tensors on the GPU are slices
# of one buffer. Torch reuses page-locked memory when the copy out of it has ended, so nothing here waits for
# a copy.
#
# `ColumnCopies` makes them on a stream of its own, beside the computation:
#
#     copies = ColumnCopies(torch.device("cuda:0"))
#     in_flight = copies.start(batch)   # on any thread
#     batch = in_flight.receive()       # on the thread that computes: its stream waits for the copy, not it
#
# Columns that are on the GPU already stay as they are. Tensors that cannot be packed, such as sparse ones,
# are copied one by one.


# Tensors of different types and shapes in one buffer of bytes.
#
# Each begins at a multiple of 256 bytes, as those that torch allocates on a GPU do, so that kernels read them
# equally fast. A tensor that occurs more than once, such as offsets that several columns share, is in the
# buffer once, and its occurrences share a tensor afterwards, too.
#
# Tensors of one dtype are side by side, because torch then makes all of them in one call: for the tens of
# columns of a batch, a few calls for each tensor would take longer than the copy.


ALIGNMENT = 256


class Packing:
    """The positions of tensors in a buffer of `nbytes` bytes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            self._groups.setdefault(tensor.dtype, []).append(tensor)
        self.nbytes = sum(_room(tensor) for group in self._groups.values() for tensor in group)

    def fill(self, buffer: Tensor) -> None:
        """Copy the tensors into a buffer on the CPU.

        One call of torch for each dtype: each call lets other threads take the interpreter's lock, and who
        wants it back waits.
        """
        start = 0
        for dtype, tensors in self._groups.items():
            end = start + sum(map(_room, tensors))
            parts = []
            for tensor in tensors:
                parts.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
                if gap := _gap(tensor):
                    parts.append(_padding(dtype, gap))
            torch.cat(parts, out=buffer[start:end].view(dtype))
            start = end

    def unpack(self, buffer: Tensor) -> dict[int, Tensor]:
        """The tensors in a buffer, or in a copy of it on any device, by the `id` of those that were packed.

        They share the memory of the buffer. To autograd they are tensors of their own: writing to one of them
        changes the version of no other.
        """
        return {id(tensor): place for tensor, place in self._places(buffer)}

    def _places(self, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each of the tensors, and the part of a buffer for it."""
        start = 0
        for dtype, tensors in self._groups.items():
            end = start + sum(map(_room, tensors))
            sizes = [size for tensor in tensors for size in (tensor.numel(), _gap(tensor))]
            parts = torch.unsafe_split_with_sizes(buffer[start:end].view(dtype), sizes)[::2]
            for tensor, part in zip(tensors, parts, strict=True):
                yield tensor, part if tensor.dim() == 1 else part.view(tensor.shape)
            start = end


def can_pack(tensor: Tensor) -> bool:
    """Whether it is plain values in main memory, without a gradient."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad


@lru_cache(1024)
def _padding(dtype: torch.dtype, count: int) -> Tensor:
    """What fills a gap."""
    return torch.zeros(count, dtype=dtype)


def _room(tensor: Tensor) -> int:
    """The bytes from the beginning of a tensor to that of the next."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _gap(tensor: Tensor) -> int:
    """The elements that are free after a tensor."""
    return _room(tensor) // tensor.element_size() - tensor.numel()


Check = Callable[[Any], None]


class CopiedBatch(Batch):
    """A batch on a device, with the checks that it passed where it was before."""

    checks: tuple[Check, ...] = ()
    device: torch.device | None = None  # on which all of its columns are


class CopyInFlight:
    """A batch that is being copied; `receive` makes it usable on the calling thread's stream."""

    def __init__(self, batch: Batch, device: torch.device, event: torch.cuda.Event | None) -> None:
        self._batch = batch
        self._device = device
        self._event = event

    def receive(self) -> Batch:
        """The batch: what is computed from now on waits for the copy, and its memory for what is computed."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._event)
            hold_until_used(self._batch.values(), current)
        return self._batch


class ColumnCopies:
    """Copies batches to a GPU on a stream of its own; several threads may use it at the same time.

    On the CPU it makes the same copies without a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_stream(self) -> AbstractContextManager[Any]:
        """Within it, this thread's current stream is that of the copies."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def start(self, batch: Batch, checks: Iterable[Check] = ()) -> CopyInFlight:
        """Begin to copy a batch, which may be written to afterwards; checks: those that it has passed."""
        with self.on_stream():
            columns = copy_columns(batch, self._device)
            event = None if self._stream is None else self._stream.record_event()
        copied = CopiedBatch.trusted(columns, batch.samples)
        copied.checks = tuple(checks)
        copied.device = self._device
        return CopyInFlight(copied, self._device, event)


def copy_columns(columns: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The columns on the device, by a copy on the current stream; also from the CPU to itself.

    Columns may be whatever has `to` and `pin_memory`, as those of a plain mapping.
    """
    packing = Packing(
        tensor for entry in columns.values() for tensor in tensors_of(entry) if can_pack(tensor)
    )
    copies: dict[int, Tensor] = {}
    if packing.nbytes:
        staging = torch.empty(packing.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        packing.fill(staging)
        copies = packing.unpack(staging.to(device, non_blocking=True))

    def moved(tensor: Tensor) -> Tensor:
        copy = copies.get(id(tensor))
        return tensor.to(device, non_blocking=True) if copy is None else copy

    def column(entry: Any) -> Any:
        if not is_column(entry):
            return entry.pin_memory().to(device, non_blocking=True)
        stays = all(tensor.device == device and id(tensor) not in copies for tensor in tensors_of(entry))
        return entry if stays else map_tensors(entry, moved)

    return {name: column(entry) for name, entry in columns.items()}


def hold_until_used(entries: Iterable[Any], stream: torch.cuda.Stream) -> None:
    """Reuse the memory of these columns only after what is queued on the stream when they are released."""
    hold_memory((tensor for entry in entries for tensor in tensors_of(entry)), stream)


def hold_memory(tensors: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
    """The same for tensors. Those that share memory, as the columns of a batch do, cost one call."""
    for tensor in allocations_of(tensors):
        tensor.record_stream(stream)


def allocations_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One tensor for each allocation on a GPU that these tensors use."""
    return list(
        {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.is_cuda}.values()
    )


def is_column(entry: Any) -> bool:
    """Whether `tensors_of` knows its tensors."""
    return isinstance(entry, Tensor | Ragged | NestedRagged | IdsReference)


def tensors_of(entry: Any) -> list[Tensor]:
    """The tensors of a column; none of other objects."""
    if isinstance(entry, Tensor):
        return [entry]
    if isinstance(entry, Ragged):
        return [t for t in (entry.values, entry.offsets, entry.weights) if t is not None]
    return [entry.values, entry.inner, entry.outer] if isinstance(entry, NestedRagged) else []


def map_tensors(entry: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A column with its tensors changed."""
    if isinstance(entry, Tensor):
        return change(entry)
    return entry.map(change) if isinstance(entry, Ragged | NestedRagged) else entry


# Recording of CUDA graphs: launches that are queued once, to be replayed by one call each time.


def record(
    stream: torch.cuda.Stream | None, work: Callable[[], None], pool: Any = None
) -> torch.cuda.CUDAGraph:
    """A graph of what `work` queues, which is not run. Its kernels have run before: that loads them.

    stream: one that only recordings use. pool: of `torch.cuda.graph_pool_handle()`, for graphs that share
    memory. Unlike `torch.cuda.graph`, it does not wait for the device, and the memory that torch holds for
    later stays: work whose memory moves is recorded again.
    """
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the recording is invalid, which the error explains
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """While a graph is recorded, no garbage is collected: finalizers may wait for the device."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
