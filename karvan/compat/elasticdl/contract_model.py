"""The model, the loss and the metrics of a contract, as a `kv.Trainer` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from karvan.compat.elasticdl.contract import ContractError
from karvan.metrics import Mean, Metric
from karvan.train.pair import Pair
from karvan.train.types import samples_of


class ContractModel(nn.Module):
    """A model whose several outputs have names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any) -> Any:
        """The predictions; several are a mapping."""
        made = self.model(features)
        if isinstance(made, tuple | list):
            return {f"output_{number}": each for number, each in enumerate(made)}
        return made


class ContractLoss:
    """`loss(labels, predictions)` as a loss of (output, batch)."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self._loss = loss

    def __call__(self, output: Any, batch: Pair) -> Any:
        """The mean; losses of samples are averaged, as ElasticDL does."""
        made = self._loss(batch.labels, output)
        return made.mean() if isinstance(made, Tensor) and made.dim() else made


class FunctionMetric(Mean):
    """The mean of a function of (labels, predictions): a number for each sample, or one for the batch."""

    def __init__(self, function: Callable[[Any, Any], Any], output: str | None = None) -> None:
        super().__init__(output=output)
        self._function = function

    @override
    def update(self, output: Any, batch: Any) -> None:
        self.add_selection(self.select(output, batch))

    @torch.no_grad()
    @override
    def select(self, output: Any, batch: Any) -> dict[str, Tensor]:
        """The function's numbers, of which one for the batch counts for each sample."""
        predictions = output if self.output is None else self._scores(output)
        labels = batch.labels
        if self.output is not None and isinstance(labels, Mapping):
            labels = labels.get(self.output, labels)
        values = torch.as_tensor(self._function(labels, predictions)).detach().double()
        if not values.dim():
            values = values.expand(samples_of(batch))
        return {"scores": values.reshape(-1), "labels": torch.zeros_like(values.reshape(-1))}


def make_metrics(found: Mapping[str, tuple[str | None, Any]]) -> dict[str, Any]:
    """The metrics of `eval_metrics_fn`: functions, or metrics of Karvan, whose label is "label"."""
    made: dict[str, Any] = {}
    for name, (output, metric) in found.items():
        if isinstance(metric, Metric):
            made[name] = metric
        elif hasattr(metric, "update_state") or not callable(metric):
            raise ContractError(
                f"eval_metrics_fn must give functions of (labels, predictions), or metrics of kv.metrics, "
                f"got {type(metric).__name__} for '{name}'."
            )
        else:
            made[name] = FunctionMetric(metric, output)
    return made
