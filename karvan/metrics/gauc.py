"""AUC within groups."""

from __future__ import annotations

from torch import Tensor

from karvan.metrics.grouped import Grouped
from karvan.metrics.ranking import Ranking, auc_of_groups

_WEIGHTINGS = ("impressions", "clicks")


class GAUC(Grouped):
    """The mean AUC of groups, usually users, weighted by their impressions.

    A group is one group wherever its samples come from: other batches, other ranks. A group with only one
    class has no AUC: the mean skips it, and `undefined_groups` counts it. It is exact: all samples are stored
    until `reset()`, 32 bytes each.

    Args:
        group: The column of groups in the batch, such as users: integers, one for each sample.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights in the batch; by default every sample counts 1.
        logits: Whether the model gives logits, which become probabilities.
        weighting: What weights a group: "impressions", the sum of its weights; or "clicks", the sum of weight
            times label, as in RecIS.

    Raises:
        ValueError: `weighting` is unknown.

    Example:
        >>> gauc = kv.metrics.GAUC(group="user")
        >>> batch = {
        ...     "user": torch.tensor([1, 1, 2, 2]),
        ...     "label": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        ... }
        >>> gauc.update(torch.tensor([2.0, 1.0, -1.0, 1.0]), batch)
        >>> gauc.compute()
        0.5
    """

    def __init__(
        self,
        group: str = "user",
        *,
        label: str | None = None,
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
