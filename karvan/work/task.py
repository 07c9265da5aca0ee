"""`Task`: some records of one part of the data, which a trainer or loader leases."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


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
