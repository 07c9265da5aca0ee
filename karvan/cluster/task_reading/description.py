"""`DataDescription`: what trainers have to know of the data that loaders read for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from karvan.cluster.loader.statistics import LoaderStatistics
from karvan.data.identity import Identity
from karvan.data.leasing.shared_data import SharedData


@dataclass(frozen=True)
class DataDescription:
    """The parts of the data and how they are cut into tasks and batches.

    digest: of all of it and of the statistics of transforms, so that batches of loaders that differ are
    noticed.
    """

    parts: tuple[tuple[str, int], ...]
    records_per_task: int
    seed: int | None
    batch_size: int
    identity: Identity
    digest: str = ""

    @classmethod
    def of(cls, data: SharedData, statistics: LoaderStatistics) -> DataDescription:
        """The description of some data."""
        made = cls(data.parts, data.records_per_task, data.seed, data.batch_size, data.identity())
        text = json.dumps([made.as_head(), statistics.digests], sort_keys=True)
        return cls(**{**vars(made), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]})

    def as_head(self) -> dict[str, Any]:
        """Its fields, for a message."""
        return {
            **asdict(self),
            "parts": [list(each) for each in self.parts],
            "identity": self.identity.state(),
        }

    @classmethod
    def from_head(cls, head: Mapping[str, Any]) -> DataDescription:
        """The description that `as_head` made."""
        parts = tuple((str(path), int(records)) for path, records in head["parts"])
        return cls(**{**head, "parts": parts, "identity": Identity.from_state(head["identity"])})

    def difference(self, other: DataDescription) -> str:
        """What differs, in words; empty if nothing does."""
        names = {"parts": "files", "identity": "content of the files"}
        for name in ("parts", "batch_size", "seed", "records_per_task", "identity"):
            if getattr(self, name) != getattr(other, name):
                return names.get(name, name)
        return ""
