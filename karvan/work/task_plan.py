"""`TaskPlan`: the tasks of an epoch, computed when they are needed and never listed.

The parts of a data set are tiled with tasks of `records_per_task` records; the last task of a part may be
shorter. Without a seed, tasks are issued in the order of the parts. With one, the order of an epoch is a
permutation that depends on (seed, epoch) alone: a small block cipher on task numbers, so that the n-th task
of ten million is found without computing the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from karvan.work.task import Task, TaskKind

MOST_TASKS = 2**53  # of an epoch
_ROUNDS = 4
_WORD = 2**64 - 1


class TaskPlan:
    """The tasks of every epoch, a pure function of the parts (path, records) and these settings."""

    def __init__(
        self, parts: Iterable[tuple[str, int]], records_per_task: int, *, seed: int | None = None
    ) -> None:
        if records_per_task < 1:
            raise ValueError(f"A task needs at least 1 record, but records_per_task is {records_per_task}.")
        self._parts = [(path, records) for path, records in parts if records]
        self.records_per_task = records_per_task
        self._seed = seed
        tasks = [-(-records // records_per_task) for _, records in self._parts]
        if sum(tasks) > MOST_TASKS:
            raise ValueError(
                f"Expected at most {MOST_TASKS:,} tasks in an epoch, got {sum(tasks):,}: take more than "
                f"{records_per_task:,} records a task."
            )
        self._ends = np.cumsum(tasks, dtype=np.int64)
        self._count = int(self._ends[-1]) if tasks else 0

    def __len__(self) -> int:
        """How many tasks an epoch has."""
        return self._count

    def task(self, epoch: int, index: int, kind: TaskKind = TaskKind.TRAIN) -> Task:
        """The task that is issued as number `index` of an epoch, from 0."""
        number = index if self._seed is None else permuted(index, self._count, self._seed, epoch)
        place = self.place_of(number)
        path, records = self._parts[place]
        first = (number - (int(self._ends[place - 1]) if place else 0)) * self.records_per_task
        return Task(kind, epoch, number, path, first, min(self.records_per_task, records - first))

    def place_of(self, number: int) -> int:
        """The place of a task's part among those that have records."""
        return int(np.searchsorted(self._ends, number, side="right"))


def permuted(index: int, count: int, *seeds: int) -> int:
    """Where a permutation of 0 … count - 1 that depends on nothing but the seeds puts `index`.

    A Feistel network permutes the numbers below the next power of 4; results that are not below `count` are
    permuted again until one is, which keeps it a permutation and takes four rounds at most on average.
    """
    if count < 2:
        return index
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = 0
    for seed in seeds:
        key = _mix(key ^ _mix(seed & _WORD))
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(key + (right << 3) + number) & mask)
        index = left << half | right
        if index < count:
            return index


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
