"""`TrainerOption`: a hook that stands for options of a `kv.Trainer`."""

from __future__ import annotations

from typing import Any

import torch

from karvan.compat.recis.hooks.hook import Hook


class TrainerOption(Hook):
    """A hook that does nothing by itself: it must be among the hooks that a Trainer is made with."""

    def options(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """The options, given the optimizer of parameters."""
        raise NotImplementedError
