"""`CheckpointReader`: the tensors of a checkpoint by name."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from karvan.checkpoint import find


class CheckpointReader:
    """Reads a checkpoint of Karvan, or the newest of a run's folder.

    Tables are "user@id" and "user@embedding", in the same order; tensors have their names.
    """

    def __init__(self, path: str) -> None:
        self._found = find(path)

    @cached_property
    def _dense(self) -> dict[str, Tensor]:
        state = self._found.state()
        tensors = state.get("tensors", state.get("model", {}))
        return {name: each for name, each in tensors.items() if isinstance(each, Tensor)}

    def tensor_names(self) -> list[str]:
        """All names."""
        tables = [f"{name}@{part}" for name in self._found.manifest.tables for part in ("id", "embedding")]
        return [*tables, *self._dense]

    def read_tensor(self, name: str) -> Tensor:
        """A tensor."""
        table, _, part = name.rpartition("@")
        if (entry := self._found.manifest.tables.get(table)) is not None and part in ("id", "embedding"):
            rows = list(self._found.parts(table))
            keys = [np.zeros(0, np.int64), *(each.keys for each in rows)]
            vectors = [np.zeros((0, entry.dim), np.float32), *(each.vectors for each in rows)]
            return torch.from_numpy(np.concatenate(keys if part == "id" else vectors))
        if name not in self._dense:
            raise KeyError(f"{self._found.path} has no tensor '{name}'.")
        return self._dense[name]

    def tensor_shape(self, name: str) -> list[int]:
        """Its sizes."""
        return list(self.read_tensor(name).shape)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Its dtype."""
        return self.read_tensor(name).dtype
