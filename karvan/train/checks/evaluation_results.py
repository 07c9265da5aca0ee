"""Checks the results of an evaluation: that it had samples, and numbers where a decision needs them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from karvan.train.step.nonfinite import nonfinite_text

if TYPE_CHECKING:
    from karvan.train.trainer import Trainer

_log = logging.getLogger("karvan.train")


class NonFinite:
    """The batches of one evaluation or prediction whose result is NaN or infinite."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._batches = 0
        self._wrong = 0
        self.columns = ""  # which columns of the first such batch have NaN or infinite values

    def see(self, batch: Any, fine: bool) -> None:
        """Count a batch."""
        self._batches += 1
        if not fine:
            self._wrong += 1
            self.columns = self.columns or nonfinite_text([batch])

    def warn(self) -> None:
        """Log one warning if there were any."""
        if self._wrong:
            _log.warning(
                "%s of %d of %d batches has NaN or infinite values.%s",
                self._what,
                self._wrong,
                self._batches,
                self.columns,
            )


def has_no_nan(output: Any) -> bool:
    """Whether an output, or none of several by name, has a NaN."""
    if isinstance(output, Mapping):
        return all(has_no_nan(each) for each in output.values())
    if isinstance(output, tuple | list):
        return all(has_no_nan(each) for each in output)
    return not (isinstance(output, Tensor) and bool(torch.isnan(output).any()))


def require_samples(samples: float) -> None:
    """Raise if an evaluation has seen no sample on any rank."""
    if not samples:
        raise ValueError(
            "The evaluation expects data with at least one sample, got none. If the data is a generator, it "
            "gives its batches only once: give a list, a torch DataLoader or a kv.data.Loader."
        )


def require_numbers(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Raise if a metric is NaN by which a callback or keep_best decides."""
    needs = {f"the callback {name}": list(names) for name, names in trainer.callbacks.needs.items()}
    if trainer.saver.best_metric is not None:
        needs["keep_best"] = [trainer.saver.best_metric]
    for who, names in needs.items():
        for name in names:
            if name in metrics and math.isnan(metrics[name]):
                raise ValueError(
                    f"The evaluation at step {trainer.step} gives NaN for '{name}', by which {who} decides."
                    + (trainer.evaluator.nonfinite or _hint(name))
                )


def _hint(name: str) -> str:
    return (
        f" Look at the evaluation data and at the model's outputs: '{name}' is NaN if one of them is, and "
        "metrics such as AUC also if all labels are equal."
    )
