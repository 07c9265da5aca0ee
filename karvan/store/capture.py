"""`Capture`: tables as they were at one moment, read by a save while training continues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from karvan.store.types import Keys, Rows


class Capture(ABC):
    """All tables as they were at the call of `Store.capture`; its methods may be called on any thread."""

    versions: Mapping[str, int]  # of the tables at that moment: `since` of the next capture

    @abstractmethod
    def part(self, table: str, part: int) -> Rows:
        """The rows of one part, which is released; the parts of a table are read in ascending order."""

    @abstractmethod
    def erased(self, table: str) -> Keys:
        """The keys that were removed since `since`, including those that were inserted again."""

    @abstractmethod
    def close(self) -> None:
        """Release what has not been read."""
