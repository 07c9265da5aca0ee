"""Checkpoints of tables and tensors, over `karvan.checkpoint`: stock `safetensors` opens them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from karvan import distributed
from karvan.checkpoint import find, save
from karvan.compat.recis.nn import SparseParameter, engines_of
from karvan.compat.unsupported import UnsupportedError, require_default

__all__ = ["CheckpointReader", "Loader", "Saver"]


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
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}

    def tensor_names(self) -> list[str]:
        """All names."""
        tables = [f"{name}@{part}" for name in self._found.manifest.tables for part in ("id", "embedding")]
        return [*tables, *self._dense]

    def read_tensor(self, name: str) -> Tensor:
        """A tensor."""
        table, _, part = name.rpartition("@")
        if (entry := self._found.manifest.tables.get(table)) is not None and part in ("id", "embedding"):
            rows = list(self._found.parts(table))
            keys = [np.zeros(0, np.int64), *(part.keys for part in rows)]
            vectors = [np.zeros((0, entry.dim), np.float32), *(part.vectors for part in rows)]
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


class Loader:
    """Loads the rows of `hashtables`, and into `tensors` those of the same names.

    Checkpoints are Karvan's; those of any number of ranks can be loaded.
    """

    def __init__(
        self,
        checkpoint_path: str,
        hashtables: Mapping[str, SparseParameter] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        parallel: int = 16,
        filter_func: Any = None,
    ) -> None:
        require_default("parallel", parallel, 16, "leave it out.")
        require_default("filter_func", filter_func, None, "use TrainingArguments(model_bank=…).")
        self._path, self._tensors = checkpoint_path, dict(tensors or {})
        self._engines = engines_of(hashtables or {})

    @torch.no_grad()
    def load(self) -> None:
        """Load."""
        state = find(self._path).load(self._engines)
        saved = state.get("tensors", state.get("model", {}))
        if missing := [name for name in self._tensors if name not in saved]:
            raise KeyError(f"{self._path} has no tensor '{missing[0]}'.")
        for name, tensor in self._tensors.items():
            tensor.copy_(saved[name])


class Saver:
    """Saves `hashtables`, all tables of their engines, and `tensors`, into a new folder.

    All ranks save together: shard_index and shard_num are the rank and the number of ranks. `parallel` is how
    many threads write.
    """

    def __init__(
        self,
        shard_index: int = 0,
        shard_num: int = 1,
        parallel: int = 8,
        path: str = ".",
        hashtables: Mapping[str, SparseParameter] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        filter_func: Any = None,
    ) -> None:
        connection = distributed.current()
        if (shard_index, shard_num) != (connection.rank, connection.world_size):
            raise UnsupportedError(
                f"shard {shard_index} of {shard_num} on rank {connection.rank} of {connection.world_size}",
                "each rank saves its own rows.",
            )
        require_default("filter_func", filter_func, None, "save fewer tables or tensors.")
        self._path, self._writers, self._tensors = path, parallel, dict(tensors or {})
        self._engines = engines_of(hashtables or {})

    def save(self) -> None:
        """Save, and wait until the checkpoint is complete."""
        save(self._path, {"tensors": self._tensors}, self._engines, writers=self._writers)
