"""Tasks: parts of the data that a trainer leases, how an epoch is divided into them, and who holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from karvan.job.roles import Role

# `Task`: some records of one part of the data, which a trainer or loader leases.


class TaskKind(StrEnum):
    """What is done with the records of a task. EXPORT has none: it is the final checkpoint."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    EXPORT = "export"


class Task(NamedTuple):
    """Records `first` to `first + records` of a part.

    They are handed out in an order that depends on (seed, epoch, number) alone, so `done` of them are the
    same records on every machine. A task that is leased again continues after them.
    """

    kind: TaskKind
    epoch: int
    number: int
    path: str
    first: int
    records: int
    done: int = 0
    """How many of its records have been acknowledged, in the order in which they are handed out."""
    tries: int = 0
    """How often it has failed with an error. A lease that ends because its holder died is no failure."""
    skipped: tuple[int, ...] = ()
    """Bad records, by their place in that order: they count as done, and nobody reads them."""

    @property
    def left(self) -> int:
        """How many records have not been acknowledged."""
        return self.records - self.done

    def __str__(self) -> str:
        if self.kind is TaskKind.EXPORT:
            return "the export"
        return f"records {self.first} to {self.first + self.records - 1} of {self.path} (epoch {self.epoch})"


class TaskLease(NamedTuple):
    """A task that a holder works on. The token is larger than those of all earlier leases of the job."""

    token: int
    holder: str
    task: Task


# `TaskPlan`: the tasks of an epoch, computed when they are needed and never listed.
#
# The parts of a data set are tiled with tasks of `records_per_task` records; the last task of a part may be
# shorter. Without a seed, tasks are issued in the order of the parts. With one, the order of an epoch is a
# permutation that depends on (seed, epoch) alone: a small block cipher on task numbers, so that the n-th task
# of ten million is found without computing the others.


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
        high, right = index >> half, index & mask
        for number in range(_ROUNDS):
            high, right = right, high ^ (_mix(key + (right << 3) + number) & mask)
        index = high << half | right
        if index < count:
            return index


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


# `WorkSpec`: the work of a job, as whoever opens the data describes it to the master.


_OF_THE_DATA = ("parts", "records_per_task", "seed")


@dataclass(frozen=True, slots=True)
class WorkSpec:
    """The data of a job, how it is cut into tasks, and how many failures the job tolerates."""

    parts: tuple[tuple[str, int], ...]
    """Path and number of records of each part, in order."""
    records_per_task: int
    seed: int | None = None
    """Of the order of tasks; None for the order of the parts."""
    epochs: int | None = 1
    """How often every record is trained; None, 0 or less: endlessly."""
    most_tries: int = 3
    """Failures of one task, of which the last fails the job."""
    skip_bad_records: int = 0
    """Records that may be skipped because they raise an error."""
    export: bool = False
    """Whether the job ends with an export task."""

    def plan(self) -> TaskPlan:
        """The tasks of every epoch."""
        return TaskPlan(self.parts, self.records_per_task, seed=self.seed)

    def settings(self) -> dict[str, Any]:
        """All of it, JSON-able, with a checksum in place of the parts."""
        names = "\n".join(f"{path} {records}" for path, records in self.parts)
        return {
            "parts": hashlib.sha256(names.encode()).hexdigest()[:16],
            **{name: getattr(self, name) for name in self.__slots__ if name != "parts"},
        }

    def check(self, stored: Mapping[str, Any], *, data_only: bool) -> None:
        """Raise a ValueError if other settings are stored; with `data_only`, if they are of other data."""
        for name, value in self.settings().items():
            if stored.get(name) != value and (name in _OF_THE_DATA or not data_only):
                advice = f"Continue with the {name} that it has begun with."
                what = name
                if name == "parts":
                    what = "the names or the numbers of records of the files"
                    advice = (
                        "Train that data to its end first, or drop the rest of it by drop_unfinished=True of "
                        "fit (without a Trainer: remove the ledger, master/work.db in the folder of "
                        "checkpoints)."
                    )
                raise ValueError(
                    f"The job has begun with other work: {what} was {stored.get(name)}, and is now {value}. "
                    f"{advice}"
                )


NO_WORK = WorkSpec((), 1, epochs=None)
"""That of a job which has trained nothing yet, and may only predict."""


# The names under which processes of a launched job hold tasks, known to them and to the master alike.


def holder_of(role: Role, index: int, process: str, part: str = "") -> str:
    """The holder's name of a process, by its KARVAN_PROCESS; part: names one of several in it."""
    return f"{role}-{index} process {process} {part}".rstrip()


def is_of_process(holder: str, process_holder: str) -> bool:
    """Whether a holder is this process, or a part of it."""
    return holder == process_holder or holder.startswith(f"{process_holder} ")


def process_of(holder: str) -> str:
    """The name of the process that a holder is, or is a part of."""
    return " ".join(holder.split(" ", 3)[:3])
