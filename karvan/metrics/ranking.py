"""Samples held until a metric is computed, and their ranking by score within groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from karvan.metrics.base import Metric, State, check_state

_Piece: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


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
            self._in_flight.append(((piece[0], piece[1], piece[2], piece[3]), copied))
            return
        # Always a copy: the tensors may be views of memory that is reused.
        piece = tuple(t.clone() for t in (groups, scores, labels, weights))
        self._pieces.append((piece[0], piece[1], piece[2], piece[3]))

    def _collect(self, wait: bool) -> None:
        """Take over the copies that have ended; wait: all of them."""
        while self._in_flight:
            pinned, copied = self._in_flight[0]
            if wait:
                copied.synchronize()
            elif not copied.query():  # type: ignore[no-untyped-call]
                return
            self._in_flight.popleft()
            groups, scores, labels, weights = (torch.empty_like(t).copy_(t) for t in pinned)
            self._pieces.append((groups, scores, labels, weights))

    def __getstate__(self) -> dict[str, Any]:
        """Without copies in flight, for copies of a metric."""
        self._collect(wait=True)
        return vars(self).copy()

    def state(self) -> State:
        """Everything as four tensors."""
        self._collect(wait=True)
        self._join()
        groups, scores, labels, weights = self._pieces[0]
        return {"groups": groups, "scores": scores, "labels": labels, "weights": weights}

    def merge(self, metric: Metric, state: Mapping[str, Tensor]) -> None:
        """Add another's samples."""
        check_state(metric, self.state(), state)
        lengths = {name: len(tensor) for name, tensor in state.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"A state of {type(metric).__name__} has entries of one length; got {lengths}.")
        self.add(
            state["scores"].double(), state["labels"].double(), state["weights"].double(), state["groups"]
        )

    def _join(self) -> None:
        if len(self._pieces) != 1:
            empty = torch.zeros(0, dtype=torch.float64)
            pieces = [(empty.long(), empty, empty, empty), *self._pieces]
            groups, scores, labels, weights = (torch.cat(each) for each in zip(*pieces, strict=True))
            self._pieces = [(groups, scores, labels, weights)]


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
