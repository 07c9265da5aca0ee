"""Keeps the dense parameters of several ranks equal.

`Parallel` does nothing; `Averaged` averages gradients by torch's DistributedDataParallel, in the way that a
`Reduction` says. The model itself stays as it is: checkpoints, callbacks and evaluations see it without the
wrapper.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from karvan.dense.communication import DenseCommunication, PowerSGD, average
from karvan.distributed import Connection
from karvan.train.losses import nothing_of
from karvan.train.types import model_input

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Reduction:
    """torch's own mean, without a hook; the others derive from it."""

    def register(self, model: DistributedDataParallel) -> None:
        """Reduce the gradients of this model, after its first backward."""

    def undo(self) -> None:
        """The step of the last reduction was skipped."""

    def state(self) -> dict[str, Any]:
        """What later reductions depend on, the same on all ranks; nothing if there is no such thing."""
        return {}

    def rank_state(self) -> dict[str, Any]:
        """The same of this rank alone."""
        return {}

    def load(self, state: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Restore what `state` gave, and what `rank_state` gave on every rank, of which this is `rank`."""


class _Hook(Reduction, ABC):
    """A hook of DistributedDataParallel for its buckets of gradients.

    torch has such hooks (torch.distributed.algorithms.ddp_comm_hooks), from which these differ:

    - They work over gloo as over NCCL. torch refuses its bf16 hook on CPUs. PowerSGD starts collectives where
      another one ends, in threads of gloo, so that with two buckets ranks may start them in different orders.
      Here the backward pass waits until a bucket is averaged.
    - Gradients in 16 bits are added up in float32, in the order of ranks, and not in 16 bits.
    - What PowerSGD remembers is saved by parameter in checkpoints, so that a fit that resumes has the bits of
      one that was never stopped. A step that is skipped leaves no trace there: otherwise a NaN, once
      remembered, would be in all later gradients.
    """

    @override
    def register(self, model: DistributedDataParallel) -> None:
        # Torch refuses annotations of a hook that are strings; a lambda has none.
        model.register_comm_hook(None, lambda state, bucket: self._reduced(bucket))

    def _reduced(self, bucket: GradBucket) -> Future[Tensor]:
        self.reduce(bucket)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> None:
        """Replace the gradients of a bucket by their mean over all ranks."""


class HalfReduction(_Hook):
    """Gradients are sent in 16 bits: first to the rank that adds up a chunk of them, then as means to all."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @override
    def reduce(self, bucket: GradBucket) -> None:
        buffer, ranks = bucket.buffer(), dist.get_world_size()
        chunk = -(-len(buffer) // ranks)
        sent = buffer.new_zeros(ranks * chunk, dtype=self._dtype)
        sent[: len(buffer)] = buffer
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        first, *others = received.view(ranks, chunk).float()
        for other in others:
            first += other
        means = list(sent.view(ranks, chunk))
        dist.all_gather(means, (first / ranks).to(self._dtype))
        buffer.copy_(sent[: len(buffer)])


class PowerSGDReduction(_Hook):
    """PowerSGD with error feedback and a warm start; see `karvan.dense.communication.PowerSGD`.

    The right factors of a step are the start of the next one's power iteration.
    """

    def __init__(self, settings: PowerSGD, model: nn.Module) -> None:
        self._settings = settings
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._steps = 0
        self._factors: dict[str, Tensor] = {}
        self._errors: dict[str, Tensor] = {}
        self._before = (0, self._factors, self._errors)  # the same, before the last reduction

    @override
    def reduce(self, bucket: GradBucket) -> None:
        if bucket.index() == 0:
            self._before = self._steps, dict(self._factors), dict(self._errors)
        if self._steps < self._settings.start_step:
            bucket.buffer().div_(dist.get_world_size())  # in this order, as torch does it
            dist.all_reduce(bucket.buffer())
        else:
            self._compress(bucket)
        if bucket.is_last():
            self._steps += 1

    def _compress(self, bucket: GradBucket) -> None:
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        large = [(name, gradient) for name, gradient in gradients.items() if self._rank_of(gradient)]
        matrices = {name: self._whole(name, gradient) for name, gradient in large}
        plain = [gradient for name, gradient in gradients.items() if name not in matrices]
        lefts = [matrix @ self._start(name, matrix) for name, matrix in matrices.items()]
        average([*plain, *lefts], [dist.get_world_size()] * (len(plain) + len(lefts)))
        lefts = [_orthonormal(factor) for factor in lefts]
        right = [matrix.T @ basis for matrix, basis in zip(matrices.values(), lefts, strict=True)]
        average(right, [dist.get_world_size()] * len(right))
        for (name, whole), basis, factor in zip(matrices.items(), lefts, right, strict=True):
            sent = basis @ factor.T
            self._factors[name], self._errors[name] = factor, whole - sent
            gradients[name].copy_(sent.view(gradients[name].shape))

    def _rank_of(self, gradient: Tensor) -> int:
        """The rank of a gradient's factors; 0 if sending it as it is takes no more."""
        rows = len(gradient) if gradient.dim() > 1 else 1
        columns = gradient.numel() // max(1, rows)
        rank = min(self._settings.rank, rows, columns)
        return rank if (rows + columns) * rank < rows * columns else 0

    def _whole(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient as a matrix, with what was not sent of those before."""
        matrix = gradient.reshape(len(gradient), -1)
        matrix = matrix if matrix.dtype is torch.float64 else matrix.float()
        if name not in self._errors:
            return matrix.clone()
        return matrix + self._errors[name].to(matrix.device)

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        """A basis, the same on all ranks, that the power iteration starts with."""
        shape, factors = (matrix.shape[1], self._rank_of(matrix)), self._factors.get(name)
        if factors is None or factors.shape != shape:
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            factors = torch.randn(shape, generator=random, dtype=matrix.dtype)
        return _orthonormal(factors.to(matrix.device))

    @override
    def undo(self) -> None:
        steps, factors, errors = self._before
        self._steps, self._factors, self._errors = steps, dict(factors), dict(errors)

    @override
    def state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "factors": {name: factor.cpu() for name, factor in self._factors.items()},
        }

    @override
    def rank_state(self) -> dict[str, Any]:
        return {"errors": {name: error.cpu() for name, error in self._errors.items()}}

    @override
    def load(self, state: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], rank: int) -> None:
        """If the number of ranks has changed, each gets the mean of what was not sent.

        No gradient is lost. A checkpoint of other reductions has nothing to start with; one of another rank
        has no factors.
        """
        self._steps = int(state.get("steps", 0))
        saved = [rank.get("errors", {}) for rank in ranks]
        if len(saved) == dist.get_world_size():
            self._errors = dict(saved[rank])
        else:
            stacks = {name: torch.stack([errors[name] for errors in saved]) for name in saved[0]}
            self._errors = {name: stack.mean(0) for name, stack in stacks.items()}
        self._factors = dict(state.get("factors", {}))


def _orthonormal(columns: Tensor) -> Tensor:
    """A basis of what columns span; also of columns that are 0 or alike."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def make_reduction(communication: DenseCommunication, model: nn.Module) -> Reduction:
    """How gradients of a model are averaged."""
    if communication.powersgd is not None:
        return PowerSGDReduction(communication.powersgd, model)
    half = HALF.get(str(communication.dense_reduce))
    return Reduction() if half is None else HalfReduction(half)


def flat_gradients(
    parameters: Sequence[Tensor], counts: Sequence[float] = (), *, none: bool = False
) -> Tensor:
    """All gradients one after the other, whether each exists, and some counts; none: as if none existed."""
    gradients = [None if none else parameter.grad for parameter in parameters]
    pieces = [
        torch.zeros(parameter.numel())
        if gradient is None
        else gradient.detach().reshape(-1).to("cpu", torch.float32)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    rest = [*(float(gradient is not None) for gradient in gradients), *counts]
    return torch.cat([*pieces, torch.tensor(rest, dtype=torch.float32)])


def set_gradients(parameters: Sequence[Tensor], flat: Tensor) -> None:
    """Give parameters the gradients of `flat_gradients`, or of a mean of several."""
    sizes = [parameter.numel() for parameter in parameters]
    *gradients, exists, _ = torch.split(flat, [*sizes, len(sizes), len(flat) - sum(sizes) - len(sizes)])
    for parameter, gradient, has in zip(parameters, gradients, exists.tolist(), strict=True):
        parameter.grad = gradient.view(parameter.shape).to(parameter) if has else None


class Parallel:
    """For a model of one process, or one that has nothing to average."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.reduction = Reduction()

    def forward(self, batch: Any) -> Any:
        """A training forward."""
        return self._model(model_input(batch))

    def begin(self, output: Any, loss: Tensor) -> Tensor:
        """The tensor to compute gradients from."""
        return loss

    def passing(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a forward and of its backward; gradients are averaged in a step's last pass."""
        return nullcontext()


class Averaged(Parallel):
    """Parameters start as those of rank 0; after a step's last pass they have the mean of all gradients."""

    def __init__(self, model: nn.Module, connection: Connection, communication: DenseCommunication) -> None:
        super().__init__(model)
        self._connection = connection
        self._shared = DistributedDataParallel(
            _Rehearsal(model), find_unused_parameters=communication.find_unused_parameters
        )
        # Torch rearranges gradients after the first pass, in the order in which they came, and the bits of
        # sums depend on positions. After a rehearsal, a fit that resumes has the sums of one never stopped.
        # Where it looks for parameters that take no part, it does not rearrange anything.
        if not communication.find_unused_parameters:
            self._shared(None).backward()
            model.zero_grad()
        self.reduction = make_reduction(communication, model)
        self.reduction.register(self._shared)

    @override
    def forward(self, batch: Any) -> Any:
        return self._shared(model_input(batch))

    @override
    def begin(self, output: Any, loss: Tensor) -> Tensor:
        """Torch expects that every head takes part, even one without a loss."""
        return loss + nothing_of(output) if isinstance(output, Mapping) and len(output) > 1 else loss

    @contextmanager
    @override
    def passing(self, last: bool) -> Iterator[None]:
        """An error of torch's collectives names the rank that is missing."""
        with self._connection.explaining(), nullcontext() if last else self._shared.no_sync():
            yield


class _Rehearsal(nn.Module):
    """A model that can be called without a batch, for gradients of zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        if batch is not None:
            return self.model(batch)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack([parameter.sum() for parameter in trained]).sum() * 0


def make_parallel(model: nn.Module, connection: Connection, communication: DenseCommunication) -> Parallel:
    """The wrapper for a model of these ranks; a collective.

    In mode async servers hold the parameters, and with average_every ranks step alone.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    averages = connection.world_size > 1 and connection.joint_steps and communication.average_every == 1
    return Averaged(model, connection, communication) if averages and trained else Parallel(model)
