"""AUC within groups."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.grouped import Grouped
from karvan.metrics.ranking import Ranking, auc_of_groups

_WEIGHTINGS = ("impressions", "clicks")


class GAUC(Grouped):
    """The mean AUC of groups (users, as a rule), each weighted by its impressions, the sum of its weights.

    weighting="clicks": each weighted by its clicks, the sum of weight times label, as in RecIS.

    Every group counts, and it is one group wherever its samples come from: other batches, other ranks. A
    group with one class only has no AUC; the mean skips it, and `undefined_groups` counts it.
    Exact: all samples are stored until `reset()`, 32 bytes each.
    """

    def __init__(
        self,
        group: str = "user",
        *,
        label: str = "label",
        output: str | None = None,
        weight: str | None = None,
        logits: bool = True,
        weighting: str = "impressions",
    ) -> None:
        if weighting not in _WEIGHTINGS:
            raise ValueError(f"GAUC expects weighting 'impressions' or 'clicks', got {weighting!r}.")
        super().__init__(group, label=label, output=output, weight=weight, logits=logits)
        self.weighting = weighting

    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        values, impressions = auc_of_groups(ranking)
        if self.weighting == "impressions":
            return values, impressions
        return values, ranking.by_group(ranking.weights * ranking.labels)
