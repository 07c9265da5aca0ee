"""`LeasedEvaluation`: an evaluation whose records the trainers of a round lease, task by task.

A slow trainer evaluates fewer records. A trainer keeps the leases of what it has evaluated until all have
added up their results. So if one dies before, its tasks, and only these, are leased by the others, who have
kept their own results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any

from karvan.data.leasing.client import WorkClient
from karvan.data.leasing.shared_data import SharedData
from karvan.data.leasing.task_records import records_done
from karvan.distributed import CollectiveChannel
from karvan.distributed.elastic.group import ElasticGroup
from karvan.ragged import Batch
from karvan.train.trainer_parts import TrainerParts


class LeasedEvaluation:
    """One evaluation; all trainers give it the same number, which no other one has since the run began."""

    def __init__(self, parts: TrainerParts, data: SharedData, client: WorkClient, number: int) -> None:
        self._evaluator = parts.evaluator
        self._data = data
        self._client = client
        self._number = number
        self._sums = parts.evaluator.begin(parts.metrics)
        self._done: dict[int, int] = {}  # records of leased tasks, by token

    def results(self, channel: CollectiveChannel) -> dict[str, float]:
        """Evaluate what is left, and add up the results of all; a collective.

        After a RankError it may be called again, in the next round.
        """
        with closing(self._batches()) as batches:
            self._evaluator.add(self._sums, self._data, batches)
        return self._evaluator.results(self._sums, channel)

    def end(self) -> None:
        """All have the results: the leases can end."""
        if self._done:
            self._client.acknowledge(self._done)

    def _batches(self) -> Generator[Batch, None, None]:
        # Reading begins here, when the evaluator has said which columns must have values.
        loader = self._data.lease_evaluation(self._client, self._number)
        try:
            for batch in loader:
                self._done |= records_done(loader.hand_over())
                yield batch
        finally:
            loader.stop()


class LeasedEvaluations:
    """The evaluations of one fit; evaluate: how data whose records cannot be leased is evaluated."""

    def __init__(
        self,
        parts: TrainerParts,
        client: WorkClient,
        group: ElasticGroup,
        evaluate: Callable[[Iterable[Any]], dict[str, float]],
    ) -> None:
        self._parts = parts
        self._client = client
        self._group = group
        self._evaluate = evaluate
        self._current: LeasedEvaluation | None = None

    def results(self, data: Iterable[Any], number: int) -> dict[str, float]:
        """Those of the next evaluation, or of the one that was interrupted; a collective."""
        if not isinstance(data, SharedData):
            return self._evaluate(data)
        if self._current is None:
            self._current = LeasedEvaluation(self._parts, data, self._client, number)
        return self._current.results(self._group.channel)

    def end(self) -> None:
        """All have the results."""
        if self._current is not None:
            self._current.end()
            self._current = None
