"""`AUROC`: `kv.metrics.AUC` inside of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from karvan import distributed
from karvan.compat.recis.metrics.accumulated import accumulated_tensor
from karvan.metrics import AUC

_LEAST_BINS = 4096


class AUROC(nn.Module):
    """The area under the ROC curve of all samples since the last reset.

    num_thresholds is at least how finely scores are told apart. dist_sync_on_step: `update` counts the
    samples of all ranks, which then call it together.
    """

    def __init__(self, num_thresholds: int = 200, dist_sync_on_step: bool = False) -> None:
        super().__init__()
        if num_thresholds <= 2:
            raise ValueError(f"AUROC expects num_thresholds above 2, got {num_thresholds}.")
        self.num_thresholds, self.dist_sync_on_step = num_thresholds, dist_sync_on_step
        self._all = self._empty()

    def _empty(self) -> AUC:
        return AUC(bins=max(_LEAST_BINS, self.num_thresholds), logits=False)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        """Count probabilities and labels."""
        channel = distributed.current().here
        if not self.dist_sync_on_step or channel.world_size == 1:
            self._all.add(predictions, labels)
            return
        batch = self._empty()
        batch.add(predictions, labels)
        self._all.merge({name: channel.sum(counts) for name, counts in batch.state().items()})

    def compute(self) -> Tensor:
        """The AUC; NaN while there is one class only."""
        return accumulated_tensor(self._all.compute())

    def forward(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """The AUC of these samples alone; nothing is counted."""
        batch = self._empty()
        batch.add(predictions, labels)
        return torch.tensor(batch.compute())

    def reset(self) -> None:
        """Forget all samples."""
        self._all.reset()

    def get_extra_state(self) -> dict[str, Any]:
        """All that has been counted, for `state_dict`."""
        return dict(self._all.state())

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self._all.load_state(state)
