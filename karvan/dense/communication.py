"""`DenseCommunication`: how ranks that train together keep their dense parameters equal.

| `average_every` | what is sent | when |
|---|---|---|
| 1 | gradients, as `dense_reduce` says (`karvan/train/data_parallel.py`) | in every step |
| n | parameters and the state of their optimizer (`PeriodicAveraging`) | every n steps |

A single process sends nothing, so it accepts all of these. In mode async servers hold the parameters: there
is nothing to average, and it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from karvan.argument_checks import check_counts, listed
from karvan.dense.steps import LocalDense, Outcome
from karvan.distributed import Connection
from karvan.embedding import EmbeddingEngine

NAMES = ("mean", "bf16", "fp16", "powersgd")


@dataclass(frozen=True)
class PowerSGD:
    """Send gradients of matrices as two factors of low rank (Vogels, Karimireddy, Jaggi, 2019).

    For a parameter of n x m, rank · (n + m) numbers are sent in place of n · m; smaller parameters are sent
    as they are. What the factors lack is added to the gradient of the next step.

    Args:
        rank: The rank of the factors: higher is more exact and sends more.
        start_step: In how many steps gradients are sent as they are, because they change a lot at first.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> reduce = kv.train.PowerSGD(rank=8)  # dense_reduce of a Trainer
    """

    rank: int = 4
    start_step: int = 1000

    def __post_init__(self) -> None:
        check_counts(1, rank=self.rank)
        check_counts(0, start_step=self.start_step)


DenseReduce: TypeAlias = str | PowerSGD


@dataclass(frozen=True)
class DenseCommunication:
    """How dense parameters stay equal.

    dense_reduce: how gradients are averaged. "mean": as they are. "bf16", "fp16": rounded to this type, which
    halves the bytes; they are added up in float32, and the mean is rounded once more. "powersgd": see
    `PowerSGD`, an object of which sets its options.
    average_every: 1 averages gradients. Above 1, each rank makes steps with its own gradients, and parameters
    and the state of their optimizer are averaged every so many steps, before evaluations and before
    checkpoints.
    find_unused_parameters: parameters that require a gradient may take no part in a batch. This takes time:
    torch looks for them in every step.
    """

    dense_reduce: DenseReduce = "mean"
    average_every: int = 1
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        check_counts(1, average_every=self.average_every)
        if not isinstance(self.find_unused_parameters, bool):
            raise TypeError(
                f"find_unused_parameters must be True or False, got {self.find_unused_parameters!r}."
            )
        if not isinstance(self.dense_reduce, PowerSGD) and self.dense_reduce not in NAMES:
            raise ValueError(
                f"dense_reduce must be one of these or a kv.train.PowerSGD, got {self.dense_reduce!r}: "
                f"{listed(self.dense_reduce, NAMES)}"
            )
        if self.average_every > 1 and self.dense_reduce != "mean":
            raise ValueError(
                f"dense_reduce={self.dense_reduce!r} is for gradients, but "
                f"average_every={self.average_every} sends none: expected one of the two."
            )
        if self.powersgd is not None and self.find_unused_parameters:
            raise ValueError(
                "dense_reduce 'powersgd' cannot be used with find_unused_parameters: what it has not sent of "
                "a parameter's gradient would be lost in steps without that parameter. Expected 'bf16'."
            )

    @property
    def powersgd(self) -> PowerSGD | None:
        """The options of PowerSGD, if it is chosen."""
        if isinstance(self.dense_reduce, PowerSGD):
            return self.dense_reduce
        return PowerSGD() if self.dense_reduce == "powersgd" else None

    @property
    def given(self) -> list[str]:
        """The options of what is sent that are not the default."""
        return [
            *(["dense_reduce"] if self.dense_reduce != "mean" else ()),
            *(["average_every"] if self.average_every != 1 else ()),
        ]

    def check(self, connection: Connection, *, scaled: bool, only_rows: bool) -> None:
        """Raise if there is nothing that could be sent like this.

        scaled: the loss is multiplied by a scale that changes. only_rows: no dense parameter is trained.
        """
        names = " and ".join(self.given)
        if not names:
            return
        if connection.settings.mode.dense_on_servers:
            raise ValueError(
                f"{names} is for ranks that average dense gradients, but in mode async servers hold the "
                "dense parameters: leave it out; pull_every of kv.connect makes trainers pull less often."
            )
        if only_rows:
            raise ValueError(
                f"{names} is for dense parameters, but there is no dense_optimizer: leave it out."
            )
        if scaled and (self.powersgd is not None or self.average_every > 1):
            raise ValueError(
                f"{names} cannot be used with precision 'fp16', because its loss scale changes from step "
                "to step: expected precision 'bf16' or 'fp32'."
            )


class PeriodicAveraging(LocalDense):
    """Parameters that step in this process, and are averaged over all ranks every so many steps.

    Ranks that make steps alone, and average their dense parameters every n steps ("local SGD", Stich, 2019).

    Parameters start as those of rank 0. After n steps, before an evaluation and before a checkpoint, all
    ranks take the mean of their parameters, and of the state of their optimizers: with moments of its own
    gradients alone, a rank's Adam need not converge (Chen et al., "Toward communication efficient adaptive
    gradient method", 2020), and a checkpoint, which has one state, could not say how training continues.
    Buffers, such as the means of a batch norm, become those of rank 0, as they do in every step that averages
    gradients.

    The n steps count from the last time that parameters were averaged, whatever the reason was. So a fit that
    resumes from a checkpoint continues exactly as the one that has saved it.

    Ranks skip the same steps: before each, they agree whether all gradients are finite.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, connection: Connection, every: int
    ) -> None:
        super().__init__(optimizer)
        self._model = model
        self._connection = connection
        self._every = every
        self._steps = 0  # since parameters were averaged
        self._trained: list[Tensor] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if any(not parameter.is_floating_point() for parameter in self._trained):
            raise ValueError("average_every averages parameters of floats, got others, such as complex ones.")

    @override
    def begin(self) -> None:
        """The model is that of rank 0."""
        self.settle()  # steps that an error has left
        with self._connection.explaining():
            for value in (*self._model.parameters(), *self._model.buffers()):
                dist.broadcast(value.detach(), 0)

    @override
    def agree(self, finite: bool) -> bool:
        flags = self._connection.main.sum(torch.tensor([0.0 if finite else 1.0]))
        return not bool(flags[0])

    @property
    @override
    def skips_on_device(self) -> bool:
        """Ranks agree on every step."""
        return False

    @override
    def step(self) -> Outcome:
        outcome = super().step()
        self._steps += 1
        if self._steps == self._every:
            self._average()
        return outcome

    @override
    def settle(self) -> None:
        if self._steps:
            self._average()

    @override
    def take(self) -> None:
        self.settle()

    def _average(self) -> None:
        self._steps = 0
        ranks = self._connection.world_size
        alike: dict[tuple[str, torch.dtype], list[tuple[Tensor, int]]] = {}
        for value, count in [*((parameter.detach(), ranks) for parameter in self._trained), *self._state()]:
            dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
            alike.setdefault((str(value.device), dtype), []).append((value, count))
        with self._connection.explaining():
            for (_, dtype), group in sorted(alike.items(), key=lambda item: str(item[0])):
                average(*zip(*group, strict=True), dtype=dtype)
            for buffer in self._model.buffers():
                dist.broadcast(buffer, 0)

    def _state(self) -> list[tuple[Tensor, int]]:
        """The optimizer's tensors, and how many ranks have each.

        A rank that lacks some, since a parameter took no part there, gets them, as zeros. Numbers, such as a
        count of steps, become the largest of all ranks.
        """
        assert self.optimizer is not None
        state = self.optimizer.state
        mine = [
            {
                name: [
                    str(value.dtype).removeprefix("torch."),
                    list(value.shape),
                    float(value) if _is_number(name, value, parameter) else None,
                ]
                for name, value in state.get(parameter, {}).items()
                if isinstance(value, Tensor) and (value.is_floating_point() or value.numel() == 1)
            }
            for parameter in self._trained
        ]
        values: list[tuple[Tensor, int]] = []
        for index, of_ranks in enumerate(zip(*self._connection.main.gather_json(mine), strict=True)):
            parameter = self._trained[index]
            for name in sorted({name for of_rank in of_ranks for name in of_rank}):
                described = [of_rank[name] for of_rank in of_ranks if name in of_rank]
                dtype, shape, number = described[0]
                if name not in state[parameter]:
                    device = torch.device("cpu") if number is not None else parameter.device
                    state[parameter][name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                if number is not None:
                    state[parameter][name].fill_(max(description[-1] for description in described))
                else:
                    values.append((state[parameter][name], len(described)))
        return values


def _is_number(name: str, value: Tensor, parameter: Tensor) -> bool:
    """Whether it is a number of the optimizer, and not one for each element of a parameter."""
    return value.numel() == 1 and (name == "step" or value.dim() < parameter.dim())


def average(values: Sequence[Tensor], counts: Sequence[int], *, dtype: torch.dtype | None = None) -> None:
    """Replace values by their means over the ranks that have them, in one message; others have zeros.

    counts: how many ranks have each. dtype: in which they are sent.
    """
    flat = torch.cat([value.reshape(-1).to(dtype or value.dtype) for value in values])
    dist.all_reduce(flat)
    parts = torch.split(flat, [value.numel() for value in values])
    with torch.no_grad():
        for value, count, part in zip(values, counts, parts, strict=True):
            value.copy_((part / count).view(value.shape))


def make_stepping(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    engines: Sequence[EmbeddingEngine],
    connection: Connection,
    prefetch: int,
    communication: DenseCommunication,
) -> LocalDense:
    """The steps of dense parameters, local or on servers by the connection's mode; a collective.

    If they are on servers, this sends the parameters there, unless trainers come and go; if ranks step alone,
    they get those of rank 0.

    """
    if optimizer is None:
        return LocalDense(optimizer)
    if not connection.settings.mode.dense_on_servers:
        if communication.average_every == 1 or connection.world_size == 1:
            return LocalDense(optimizer)
        averaging = PeriodicAveraging(model, optimizer, connection, communication.average_every)
        averaging.begin()
        return averaging
    from karvan.dense.remote import (
        ElasticDense,  # imports Arrow Flight, which takes a while
        RemoteDense,
    )

    make = RemoteDense if connection.group is None else ElasticDense
    remote = make(model, optimizer, engines, connection, prefetch)
    remote.begin()
    return remote
