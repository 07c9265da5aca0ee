"""Reads files of `torch.save` that hold tensors and plain values alone; nothing in them is executed."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from karvan.checkpoint.errors import CheckpointError, DamagedCheckpointError

_DDP = "module."  # before the names of a net within DistributedDataParallel


class CodeInFileError(CheckpointError):
    """A file whose objects can be made only by running code."""


def read_torch(path: Path) -> dict[str, Any]:
    """The dict in a file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CodeInFileError(
            path,
            "expected a file of torch.save with tensors and plain values alone, because Karvan runs no "
            f"code of a checkpoint, got: {_first_line(error)}",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(
            path, f"expected a whole file of torch.save, got: {_first_line(error)}"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError.mismatch(path, "a dict", type(content).__name__)
    return dict(content)


def read_tensors(path: Path, notes: list[str]) -> dict[str, Tensor]:
    """The tensors of a net's state dict in a file, without the prefix of DistributedDataParallel."""
    content = read_torch(path)
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    left = [name for name in content if name not in tensors]
    if (left and not tensors) or not all(isinstance(name, str) for name in tensors):
        wrong = next(iter(left), None) or next(name for name in tensors if not isinstance(name, str))
        raise CheckpointError.mismatch(
            path, "a state dict of tensors by name", f"{type(content[wrong]).__name__} as {wrong!r}"
        )
    if left:
        listed = ", ".join(f"'{name}'" for name in left)
        notes.append(f"{path.name}: not imported, because it is not a tensor: {listed}.")
    if tensors and all(name.startswith(_DDP) for name in tensors):
        tensors = {name.removeprefix(_DDP): value for name, value in tensors.items()}
    return tensors


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".") + "."
