"""`WorkSpec`: the work of a job, as whoever opens the data describes it to the master."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from karvan.work.task_plan import TaskPlan

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

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], parts: tuple[tuple[str, int], ...]) -> WorkSpec:
        """The spec of these parts with the other settings."""
        return cls(**{**settings, "parts": parts})

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
