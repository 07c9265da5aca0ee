"""Checks the results of evaluations and predictions: that there were samples, and numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from karvan.train.step.nonfinite import nonfinite_text

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
