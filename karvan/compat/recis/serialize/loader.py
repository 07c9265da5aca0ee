"""`Loader`: loads what `Saver` has saved, or a Trainer's checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from karvan.checkpoint import find
from karvan.compat.recis.nn.modules.hashtable import SparseParameter, engines_of
from karvan.compat.unsupported import require_default


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
