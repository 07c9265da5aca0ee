"""Area under the ROC curve."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from karvan.metrics.base import Metric, State, check_state
from karvan.metrics.ranking import Ranking, Samples, auc_of_groups
from karvan.native import _native

_LIMIT = 20.0  # logits beyond it share the outermost bins


class AUC(Metric):
    """The chance that a positive sample has a higher score than a negative one; ties count a half.

    Scores are probabilities and are counted in bins that are equally wide as logits, from -20 to 20. Rare
    clicks, with small probabilities, are resolved as well as others. Pairs within a bin count as ties, so the
    error is at most half the share of (positive, negative) pairs that are in one bin; `error_bound()` gives
    that for the samples seen. For logits spread over a few units it is about 1e-4, and the error itself far
    smaller. Memory and work do not grow with the number of samples.

    Args:
        bins: The number of bins. More are more exact.
        exact: Whether to store every sample instead, 32 bytes each, and accept scores of any range.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.

    Raises:
        ValueError: There are fewer than 2 bins.

    Example:
        >>> auc = kv.metrics.AUC()
        >>> logits = torch.tensor([2.0, -1.0, 0.5, -2.0])
        >>> auc.update(logits, {"label": torch.tensor([1.0, 0.0, 0.0, 1.0])})
        >>> auc.compute()
        0.5
    """

    higher_is_better = True
    _counts: Tensor  # positives, negatives and invalid samples of each bin

    def __init__(
        self,
        bins: int = 2**16,
        exact: bool = False,
        *,
        label: str | None = None,
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
    ) -> None:
        if bins < 2:
            raise ValueError(f"AUC expects at least 2 bins, got {bins}.")
        self.bins = bins
        self.exact = exact
        super().__init__(label=label, output=output, weight=weight, logits=logits)

    def _add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        if self.exact:
            self._samples.add(scores, labels, weights, None)
            return
        self._counts = self._counts.to(scores.device)
        if scores.is_cpu:
            scores, labels = scores.contiguous(), labels.contiguous()
            weights = None if weights is None else weights.contiguous()
            _native.count_scores(
                scores.data_ptr(),
                labels.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                len(scores),
                _LIMIT,
                self.bins,
                self._counts.data_ptr(),
            )
        else:
            count_scores(scores, labels, weights, self._counts)

    def compute(self) -> float:
        """Compute the AUC; NaN while there is only one class."""
        if self.exact:
            state = self._samples.state()
            if not len(state["scores"]) or bool(state["scores"].isnan().any()):
                return float("nan")
            return float(auc_of_groups(Ranking.of(state))[0])
        clicks, others = self._histogram()
        pairs = clicks.sum() * others.sum()
        below = others.cumsum(0) - others / 2
        return float((clicks * below).sum() / pairs)

    def error_bound(self) -> float:
        """Compute how far `compute()` can be from the exact AUC of the samples seen.

        Returns:
            The bound.
        """
        if self.exact:
            return 0.0
        clicks, others = self._histogram()
        return float((clicks * others).sum() / (2 * clicks.sum() * others.sum()))

    def reset(self) -> None:
        """Forget all samples."""
        self._samples = Samples()
        self._counts = torch.zeros(3, 0 if self.exact else self.bins + 2, dtype=torch.float64)

    def state(self) -> State:
        """Copy the histogram, or the samples."""
        return self._samples.state() if self.exact else {"counts": self._counts.cpu().clone()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add another's samples; the number of bins must be the same."""
        if self.exact:
            self._samples.merge(self, state)
            return
        check_state(self, {"counts": self._counts}, state)
        if state["counts"].shape != self._counts.shape:
            raise ValueError(
                f"This AUC has {self.bins} bins, but the state has {state['counts'].shape[-1] - 2}."
            )
        self._counts = self._counts + state["counts"].to(self._counts)

    def _histogram(self) -> tuple[Tensor, Tensor]:
        clicks, others, wrong = self._counts.cpu()
        if wrong[self.bins + 1]:
            raise ValueError(
                f"AUC expects scores and labels from 0 to 1, but {int(wrong[self.bins + 1])} samples had "
                "others; logits=True takes logits, exact=True any scores."
            )
        if wrong[self.bins]:
            clicks = clicks * float("nan")
        return clicks[: self.bins], others[: self.bins]


def count_scores(scores: Tensor, labels: Tensor, weights: Tensor | None, counts: Tensor) -> None:
    """The native core's counting for any device, without synchronising with it."""
    bins = counts.shape[1] - 2
    index = (torch.logit(scores) * (bins / (2 * _LIMIT)) + bins / 2).clamp(0, bins - 1).long()
    # Two more bins count NaN and values that are no probabilities: a check here would synchronise.
    known = (scores >= 0) & (scores <= 1) & (labels >= 0) & (labels <= 1)
    index = torch.where(known, index, bins + 1 - scores.isnan().long())  # `where` of a number would wait
    clicks = labels if weights is None else labels * weights
    others = 1 - labels if weights is None else weights - clicks
    counts[0].index_add_(0, index, clicks)
    counts[1].index_add_(0, index, others)
    counts[2].index_add_(0, index, (~known).double())
