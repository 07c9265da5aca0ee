"""Samples held until a metric is computed, and their ranking by score within groups."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from karvan.metrics.base import Metric, State, check_state
from karvan.native import _native

_Piece: TypeAlias = tuple[Tensor, ...]  # groups, scores, labels, weights


class Samples:
    """All samples added so far, on the CPU: 32 bytes each.

    Copies from a GPU are collected once they have ended, so adding samples does not wait for it.
    """

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []
        self._in_flight: deque[tuple[_Piece, torch.cuda.Event]] = deque()  # in page-locked memory

    def add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        """Store a copy of these; those without a group are in group 0."""
        weights = torch.ones_like(scores) if weights is None else weights
        groups = torch.zeros_like(scores, dtype=torch.int64) if groups is None else groups
        self._collect(wait=not scores.is_cuda)
        if scores.is_cuda:
            piece = tuple(
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in (groups, scores, labels, weights)
            )
            copied = torch.cuda.current_stream(scores.device).record_event()
            self._in_flight.append((piece, copied))
            return
        # Always a copy: the tensors may be views of memory that is reused.
        self._pieces.append(tuple(t.clone() for t in (groups, scores, labels, weights)))

    def _collect(self, wait: bool) -> None:
        """Take over the copies that have ended; wait: all of them."""
        while self._in_flight:
            pinned, copied = self._in_flight[0]
            if wait:
                copied.synchronize()
            elif not copied.query():  # type: ignore[no-untyped-call]
                return
            self._in_flight.popleft()
            self._pieces.append(tuple(torch.empty_like(t).copy_(t) for t in pinned))

    def __getstate__(self) -> dict[str, Any]:
        """Without copies in flight, for copies of a metric."""
        self._collect(wait=True)
        return vars(self).copy()

    def state(self) -> State:
        """Everything as four tensors."""
        self._collect(wait=True)
        if len(self._pieces) != 1:
            empty = torch.zeros(0, dtype=torch.float64)
            pieces = [(empty.long(), empty, empty, empty), *self._pieces]
            self._pieces = [tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))]
        return dict(zip(("groups", "scores", "labels", "weights"), self._pieces[0], strict=True))

    def merge(self, metric: Metric, state: Mapping[str, Tensor]) -> None:
        """Add another's samples."""
        check_state(metric, self.state(), state)
        lengths = {name: len(tensor) for name, tensor in state.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"A state of {type(metric).__name__} has entries of one length; got {lengths}.")
        self.add(
            state["scores"].double(), state["labels"].double(), state["weights"].double(), state["groups"]
        )


@dataclass(frozen=True, slots=True)
class Ranking:
    """Samples by group and, within it, by falling score; equal scores of a group are one *run*.

    `group` and `run` number them for each sample; `first` is the run's first sample, `start` its group's.
    """

    scores: Tensor
    labels: Tensor
    weights: Tensor
    group: Tensor
    run: Tensor
    first: Tensor
    start: Tensor
    groups: int

    @classmethod
    def of(cls, state: State) -> Ranking:
        """Sort samples."""
        order = state["scores"].argsort(descending=True, stable=True)
        order = order[state["groups"][order].argsort(stable=True)]
        groups, scores = state["groups"][order], state["scores"][order]
        position = torch.arange(len(order))
        new_group = torch.ones(len(order), dtype=torch.bool)
        new_group[1:] = groups[1:] != groups[:-1]
        new_run = new_group.clone()
        new_run[1:] |= scores[1:] != scores[:-1]
        group, run = new_group.cumsum(0) - 1, new_run.cumsum(0) - 1
        count = int(new_group.sum())
        return cls(
            scores,
            state["labels"][order],
            state["weights"][order],
            group,
            run,
            position[new_run],
            position[new_group],
            count,
        )

    def by_group(self, values: Tensor) -> Tensor:
        """Sums over groups."""
        return torch.zeros(self.groups, dtype=torch.float64).index_add_(0, self.group, values)

    def by_run(self, values: Tensor) -> Tensor:
        """Sums over runs."""
        return torch.zeros(len(self.first), dtype=torch.float64).index_add_(0, self.run, values)

    @property
    def group_of_run(self) -> Tensor:
        """The group of each run."""
        return self.group[self.first]

    @property
    def rank_of_run(self) -> Tensor:
        """How many samples of its group come before each run."""
        return self.first - self.start[self.group_of_run]


def auc_of_groups(ranking: Ranking) -> tuple[Tensor, Tensor]:
    """Each group's AUC, NaN where there is one class only, and its weight."""
    clicks = ranking.weights * ranking.labels
    others = ranking.weights * (1 - ranking.labels)
    in_run, in_group = ranking.by_run(others), ranking.by_group(others)
    # Others of the same group with a higher score: those before in all, less those before the group.
    before = in_run.cumsum(0) - in_run
    above = before - (in_group.cumsum(0) - in_group)[ranking.group_of_run]
    lost = ranking.by_run(clicks) * (above + in_run / 2)
    pairs = ranking.by_group(clicks) * in_group
    sums = torch.zeros(ranking.groups, dtype=torch.float64).index_add_(0, ranking.group_of_run, lost)
    return torch.where(pairs > 0, 1 - sums / pairs, float("nan")), ranking.by_group(ranking.weights)


_LIMIT = 20.0  # logits beyond it share the outermost bins


@dataclass(eq=False, repr=False)
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

    bins: int = 2**16
    exact: bool = False
    _counts: Tensor = field(init=False)  # positives, negatives and invalid samples of each bin
    higher_is_better = True

    def __post_init__(self) -> None:
        if self.bins < 2:
            raise ValueError(f"AUC expects at least 2 bins, got {self.bins}.")
        super().__post_init__()

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
    probabilities = (scores >= 0) & (scores <= 1) & (labels >= 0) & (labels <= 1)
    index = torch.where(
        probabilities, index, bins + 1 - scores.isnan().long()
    )  # `where` of a number would wait
    clicks = labels if weights is None else labels * weights
    others = 1 - labels if weights is None else weights - clicks
    counts[0].index_add_(0, index, clicks)
    counts[1].index_add_(0, index, others)
    counts[2].index_add_(0, index, (~probabilities).double())


# Metrics that are a mean over groups of samples.


class Grouped(Metric):
    """A weighted mean over groups, which `group` names in the batch: integers, one for each sample."""

    higher_is_better = True

    def _add(self, scores: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        if groups is None:
            raise ValueError(f"{type(self).__name__}.add expects groups, one for each score, got None.")
        self._samples.add(scores, labels, weights, groups)

    @abstractmethod
    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        """Each group's number, NaN where it has none, and its weight in the mean."""

    def compute(self) -> float:
        """The mean over the groups that have a number; NaN if there are none."""
        total, weight = self.totals()
        return total / weight if weight else float("nan")

    def totals(self) -> tuple[float, float]:
        """The sum of weight times number over the groups that have a number, and of their weights.

        Sums of several metrics add up to those of all their groups, where groups of the same name stay apart.
        """
        state = self._samples.state()
        if bool(state["scores"].isnan().any()):
            return float("nan"), float("nan")
        values, weights = self._by_group(Ranking.of(state))
        valid = ~values.isnan()
        return float((values[valid] * weights[valid]).sum()), float(weights[valid].sum())

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return Ranking.of(self._samples.state()).groups

    @property
    def undefined_groups(self) -> int:
        """How many of them have no number and are skipped in the mean."""
        return int(self._by_group(Ranking.of(self._samples.state()))[0].isnan().sum())

    def reset(self) -> None:
        """Forget all samples."""
        self._samples = Samples()

    def state(self) -> State:
        """All samples."""
        return self._samples.state()

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add another's samples."""
        self._samples.merge(self, state)


@dataclass(eq=False, repr=False)
class TopK(Grouped):
    """A mean over groups of a number about the `k` highest scores of each.

    Groups count the same, or as the mean weight of their samples where a weight is named.
    """

    k: int = 10
    group: str = "user"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"{type(self).__name__} expects k of at least 1, got {self.k}.")
        super().__post_init__()

    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        sizes = ranking.by_group(torch.ones_like(ranking.scores))
        return self._values(ranking), ranking.by_group(ranking.weights) / sizes

    @abstractmethod
    def _values(self, ranking: Ranking) -> Tensor:
        """Each group's number, NaN where it has none."""


@dataclass(eq=False, repr=False)
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

    group: str = "user"
    weighting: str = field(default="impressions", kw_only=True)

    def __post_init__(self) -> None:
        if self.weighting not in ("impressions", "clicks"):
            raise ValueError(f"GAUC expects weighting 'impressions' or 'clicks', got {self.weighting!r}.")
        super().__post_init__()

    def _by_group(self, ranking: Ranking) -> tuple[Tensor, Tensor]:
        values, impressions = auc_of_groups(ranking)
        if self.weighting == "impressions":
            return values, impressions
        return values, ranking.by_group(ranking.weights * ranking.labels)


class HitRate(TopK):
    """The fraction of groups with a positive sample among their `k` highest scores.

    Where equal scores are on both sides of rank k, a group counts with the probability of a hit in random
    order. A group without a positive sample is skipped, and `undefined_groups` counts it.

    Args:
        k: How many of the highest scores of a group count.
        group: The column of groups in the batch, such as users: integers, one for each sample.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights; a group counts as their mean. By default groups count the same.
        logits: Whether the model gives logits, which become probabilities.

    Raises:
        ValueError: `k` is below 1.

    Example:
        >>> hits = kv.metrics.HitRate(k=1, group="user")
        >>> batch = {
        ...     "user": torch.tensor([1, 1, 2, 2]),
        ...     "label": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        ... }
        >>> hits.update(torch.tensor([2.0, 1.0, -1.0, 1.0]), batch)
        >>> hits.compute()
        0.5
    """

    def _values(self, ranking: Ranking) -> Tensor:
        positive = (ranking.labels > 0).double()
        sizes = ranking.by_run(torch.ones_like(positive))
        hits = ranking.by_run(positive)
        draws = (self.k - ranking.rank_of_run).clamp(min=0).double().minimum(sizes)
        # No hit among `draws` drawn out of `sizes`, of which `hits` are positive: C(m-r, s) / C(m, s).
        misses = sizes - hits
        possible = draws <= misses
        missed = torch.where(
            possible, torch.exp(_log_choose(misses, draws.minimum(misses)) - _log_choose(sizes, draws)), 0.0
        )
        none = torch.ones(ranking.groups, dtype=torch.float64)
        none.scatter_reduce_(0, ranking.group_of_run, missed, "prod")
        return torch.where(ranking.by_group(positive) > 0, 1 - none, float("nan"))


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


class NDCG(TopK):
    """The mean NDCG@k of groups: labels are gains, rank r (from 1) is discounted by log2(r + 1).

    As in scikit-learn, samples with equal scores share their ranks. A group without a positive label is
    skipped, and `undefined_groups` counts it.

    Args:
        k: How many of the highest scores of a group count.
        group: The column of groups in the batch, such as users: integers, one for each sample.
        label: The column of labels in the batch. By default the one of a Trainer's loss, otherwise "label".
        output: The name of the scores in the model's output; None if that is a tensor itself.
        weight: A column of weights; a group counts as their mean. By default groups count the same.
        logits: Whether the model gives logits, which become probabilities.

    Raises:
        ValueError: `k` is below 1.

    Example:
        >>> ndcg = kv.metrics.NDCG(k=2, group="user")
        >>> batch = {
        ...     "user": torch.tensor([1, 1, 1]),
        ...     "label": torch.tensor([1.0, 0.0, 0.0]),
        ... }
        >>> ndcg.update(torch.tensor([0.5, 2.0, -1.0]), batch)
        >>> round(ndcg.compute(), 4)
        0.6309
    """

    def _values(self, ranking: Ranking) -> Tensor:
        ideal = Ranking.of(
            {
                "groups": ranking.group,
                "scores": ranking.labels,
                "labels": ranking.labels,
                "weights": ranking.weights,
            }
        )
        best = self._gain(ideal)
        return torch.where(best > 0, self._gain(ranking) / best, float("nan"))

    def _gain(self, ranking: Ranking) -> Tensor:
        rank = torch.arange(len(ranking.scores)) - ranking.start[ranking.group]
        discount = torch.where(rank < self.k, 1 / torch.log2(rank.double() + 2), 0.0)
        sizes = ranking.by_run(torch.ones_like(ranking.scores))
        shared = ranking.by_run(discount) / sizes
        return ranking.by_group(ranking.labels * shared[ranking.run])
