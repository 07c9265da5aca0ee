"""`report`: numbers that a model reports from inside of its forward, such as the share of cut sequences.

A forward of a Trainer collects what is reported in it. The numbers then travel with the losses of their
batch, through steps, ranks and checkpoints: all of these compute weighted sums. For each name there are two
entries, the number and a 1. Their ratio is the mean over those batches in which the name was reported, also
if others have none. No GPU is waited for before the mean is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

_NUMBER, _COUNT = "report:", "reports:"
_TAKEN = (
    "loss",
    "samples_per_second",
    "rows",
    "memory",
    "staleness",
    "staleness_max",
    "dense_staleness",
)
_TAKEN_STARTS = ("loss/", "lr/", "rows/", _NUMBER, _COUNT)

Value = TypeVar("Value", Tensor, float)


class Reported:
    """What one forward has reported."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Count a number; several of one name become their mean."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def entries(self, metrics: Iterable[str]) -> dict[str, Tensor]:
        """The entries that travel with the losses; an error if one has the name of a metric."""
        if self._sums and (both := sorted(set(self._sums) & set(metrics))):
            raise ValueError(
                f"kv.train.report expects names that no metric of the Trainer has, got '{both[0]}'."
            )
        made: dict[str, Tensor] = {}
        for name, total in self._sums.items():
            count = self._counts[name]
            made[_NUMBER + name] = total if count == 1 else total / count
            made[_COUNT + name] = torch.ones((), dtype=torch.float64)
        return made


_current: ContextVar[Reported | None] = ContextVar("karvan_reports", default=None)


@contextmanager
def collecting() -> Iterator[Reported]:
    """The context of a forward whose reports count."""
    reported = Reported()
    token = _current.set(reported)
    try:
        yield reported
    finally:
        _current.reset(token)


def report(name: str, value: Any) -> None:
    """Report a number from inside a model's forward.

    A Trainer shows the mean over the batches since its last report with the losses: in progress, logs and
    TensorBoard. Evaluations have the mean over all samples in their result. With several ranks it is the mean
    of all. Outside of a Trainer's forward it does nothing.

    Args:
        name: A name that no loss or metric has. Several reports of one name in a forward count as their mean.
        value: A number, or a tensor of one element on any device. Nothing waits for it.

    Raises:
        TypeError: `name` is no text, or `value` no number.
        ValueError: The name is taken, or the tensor has several elements.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def forward(self, batch):
        ...         kv.train.report("long", (batch["age"] > 60).float().mean())
        ...         return batch["age"] * 0.1
        >>> output = Net()({"age": torch.tensor([30.0, 70.0])})
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"kv.train.report expects a name, got {name!r}.")
    if name in _TAKEN or name.startswith(_TAKEN_STARTS):
        raise ValueError(f"kv.train.report expects a name that no other number has, got '{name}'.")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"kv.train.report expects one number for '{name}', such as a mean, got shape "
                f"{tuple(value.shape)}."
            )
    elif isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        value = torch.tensor(float(value), dtype=torch.float64)
    else:
        raise TypeError(f"kv.train.report expects a number for '{name}', got {type(value).__name__}.")
    reported = _current.get()
    if reported is not None:
        # A copy, since it may be a part of something large, or be written to.
        reported.add(name, value.detach().reshape(()).to(torch.float64, copy=True))


def split_reports(entries: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Losses, and the means of what was reported."""
    losses = {name: value for name, value in entries.items() if not name.startswith((_NUMBER, _COUNT))}
    reports = {
        name.removeprefix(_NUMBER): value / entries[_COUNT + name.removeprefix(_NUMBER)]
        for name, value in entries.items()
        if name.startswith(_NUMBER)
    }
    return losses, reports
