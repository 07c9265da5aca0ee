"""`TrainerOption`: a hook that stands for options of a `kv.Trainer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from karvan.compat.recis.hooks.hook import Hook


class TrainerOption(Hook, ABC):
    """A hook that does nothing by itself: it must be among the hooks that a Trainer is made with."""

    @abstractmethod
    def options(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """The options, given the optimizer of parameters."""
