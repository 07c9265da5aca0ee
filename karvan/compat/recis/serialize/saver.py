"""`Saver`: saves tables and tensors in a checkpoint of Karvan, which stock `safetensors` opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from karvan import distributed
from karvan.checkpoint import save
from karvan.compat.recis.nn.modules.hashtable import SparseParameter, engines_of
from karvan.compat.unsupported import UnsupportedError, require_default


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
