"""Steps of dense parameters: checks of their tensors, answers to a push, and `LocalDense`."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.native import _native
from karvan.torch_internals import foreach_norm, skips_on_device, step_unless

_LARGE = 1 << 20  # elements for which one reduction is as fast as that of many tensors together

Array: TypeAlias = Tensor | NDArray[Any]


def dense_tensor(name: str, array: Array, copy: bool) -> Tensor:
    """A contiguous float32 tensor on the CPU."""
    if isinstance(array, np.ndarray):
        # Torch warns of read-only memory, such as that of messages, and does not support negative strides.
        array = torch.from_numpy(array if array.flags.carray else array.copy())
    if not isinstance(array, Tensor) or not array.is_floating_point():
        kind = array.dtype if isinstance(array, Tensor) else type(array).__name__
        raise ValueError(f"'{name}' must be an array of floats, got {kind}.")
    if array.layout is not torch.strided:
        array = array.to_dense()
    array = array.detach().to("cpu", torch.float32, copy=copy, memory_format=torch.contiguous_format)
    return array.contiguous()


def expect_number(what: str, value: int) -> None:
    """Raise unless it is a valid version or sequence number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{what} must be a number from 0 on, got {value!r}.")


def expect_gradients(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Raise unless gradients are for existing parameters and have their shapes."""
    for name, gradient in gradients.items():
        if name not in parameters:
            raise ValueError(
                f"Expected gradients for some of the parameters {_names(parameters)}, got one for '{name}'."
            )
        if gradient.shape != parameters[name].shape:
            raise ValueError(
                f"The gradient for '{name}' must have shape {list(parameters[name].shape)}, "
                f"got {list(gradient.shape)}."
            )


def _names(parameters: Mapping[str, Any]) -> str:
    names = [f"'{name}'" for name in list(parameters)[:8]]
    return (", ".join(names) or "none") + (", …" if len(parameters) > 8 else "")


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether no element is an infinity or a NaN."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    dense = [g for g in dense if g.numel()]  # torch has no largest magnitude of nothing
    if not dense:
        return True
    if all(g.is_cpu and g.dtype is torch.float32 and g.is_contiguous() for g in dense):
        return _native.all_finite([g.data_ptr() for g in dense], [g.numel() for g in dense])
    return bool(torch.isfinite(largest_magnitude(dense)))


def largest_magnitude(gradients: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of gradients that are not empty, on their device; NaN if an element is NaN.

    Unlike a sum, it cannot overflow.
    """
    joined = _neighbours(gradients)
    few = [tensor for tensor in joined if tensor.numel() < _LARGE]
    norms = [torch.linalg.vector_norm(tensor, math.inf) for tensor in joined if tensor.numel() >= _LARGE]
    norms += foreach_norm(few, math.inf) if few else ()
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    return torch.stack(norms).amax()


def _neighbours(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, those that follow each other in one allocation as one, which takes fewer calls.

    Gradients of features that are computed together are such neighbours.
    """
    groups: list[tuple[Tensor, int]] = []  # the first of some neighbours, and the elements of all
    end, memory, dtype = 0, 0, None
    for tensor in tensors:
        first, size = tensor, tensor.numel()
        begin, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        is_plain = tensor.is_contiguous()
        if is_plain and begin == end and storage == memory and tensor.dtype is dtype:
            first, before = groups.pop()
            size += before
        groups.append((first, size))
        end, memory, dtype = begin + tensor.nbytes if is_plain else 0, storage, tensor.dtype
    return [first if size == first.numel() else first.as_strided((size,), (1,)) for first, size in groups]


Outcome: TypeAlias = Literal["accepted", "rejected", "not finite"]  # of a trainer's push to all servers


@dataclass(frozen=True)
class Answer:
    """The outcome of a push of gradients.

    accepted: whether it counts, now or later; applied: whether this push made a step.
    version: the server's version after it; staleness: how many versions the gradients were behind before it.
    reason, if not accepted: "stale", "ahead" (of a server that lost steps), "not finite", or "forgotten",
    a sequence number so old that it is unknown whether it was applied.
    """

    accepted: bool
    version: int
    applied: bool
    staleness: int = 0
    reason: str = ""


@dataclass
class Staleness:
    """How far this trainer's gradients were behind when they arrived, rejected ones included."""

    pushes: int = 0
    largest: int = 0
    total: int = 0
    rejected: int = 0

    @property
    def mean(self) -> float:
        """The mean over pushes, each by the server where it was furthest behind."""
        return self.total / self.pushes if self.pushes else 0.0


class LocalDense:
    """Parameters that step in this process; `RemoteDense` and `PeriodicAveraging` derive from it."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.staleness = Staleness()  # of gradients when they were applied: here they are not behind

    def begin(self) -> None:
        """Training starts with the model as it is now; a collective."""

    def fresh(self) -> None:
        """Get the newest parameters, before a step."""

    def attempts(self) -> Generator[int, None, None]:
        """Attempts at a step; the caller stops after one that is not rejected."""
        yield 0

    def agree(self, finite: bool) -> bool:
        """Whether gradients are finite on all ranks that must make a step together.

        Averaged gradients need no message for that: they are the same on all ranks.
        """
        return finite

    def step(self) -> Outcome:
        """Make a step with the current gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
        return "accepted"

    @property
    def skips_on_device(self) -> bool:
        """Whether `step_unless` works for the next step."""
        return self.optimizer is None or skips_on_device(self.optimizer)

    def step_unless(self, found_inf: Tensor) -> None:
        """Make a step unless this float on the parameters' device is 1.0; without waiting for it."""
        if self.optimizer is not None:
            step_unless(self.optimizer, found_inf)

    def settle(self) -> None:
        """Wait for all trainers' steps and get the resulting parameters; a collective."""

    def take(self) -> None:
        """As `settle`, and on rank 0 get the optimizer's state, too."""
