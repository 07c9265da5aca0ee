"""AUC within groups."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.grouped import Grouped
from karvan.metrics.ranking import Ranking, auc_of_groups


class GAUC(Grouped):
    """The mean AUC of groups (users, as a rule), each weighted by its impressions, the sum of its weights.

    Every group counts, and it is one group wherever its samples come from: other batches, other ranks. A
    group with one class only has no AUC; the mean skips it, and `undefined_groups` counts it.
    Exact: all samples are stored until `reset()`, 32 bytes each.
    """

    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        return auc_of_groups(ranking)
