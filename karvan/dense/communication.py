"""`DenseCommunication`: how ranks that train together keep their dense parameters equal.

| `average_every` | what is sent | when |
|---|---|---|
| 1 | gradients, as `dense_reduce` says (`karvan/train/step/data_parallel.py`) | in every step |
| n | parameters and the state of their optimizer (`factory.py`) | every n steps |

A single process sends nothing, so it accepts all of these. In mode async servers hold the parameters: there
is nothing to average, and it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from karvan.argument_checks import check_counts, listed
from karvan.distributed import Connection

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
