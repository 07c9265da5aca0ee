"""What a custom loop receives for a batch: outputs in float32, and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from karvan.label_columns import refuse_missing

# `ContextLoader`: the iterable of batches that `loader` of a context gives.


class ContextLoader:
    """Data in a context; each iteration starts from the beginning, or where the context says."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


Labels: TypeAlias = str | Sequence[str] | None


def full(output: Any) -> Any:
    """The output with half precision as float32, so that its loss is not rounded."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):
        return {name: full(each) for name, each in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(full, output))
    return type(output)(map(full, output)) if isinstance(output, list | tuple) else output


def names_of(label: Labels) -> list[str]:
    """The columns that `label` means."""
    return [] if label is None else [label] if isinstance(label, str) else list(label)


def labels_of(batch: Mapping[str, Any], label: Labels, device: torch.device) -> Any:
    """The column of that name, or several by name, on a device; None for None."""
    if label is None:
        return None
    if isinstance(label, str):
        return _column(batch, label, device)
    return {name: _column(batch, name, device) for name in label}


def _column(batch: Mapping[str, Any], name: str, device: torch.device) -> Any:
    if name not in batch:
        raise KeyError(
            f"There is no label '{name}' in the batch, which has: {', '.join(map(str, batch.keys()))}. "
            "Name the right column with label=, or set label=None if there is none."
        )
    return refuse_missing(name, batch[name]).to(device)
