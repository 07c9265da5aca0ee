"""Which rows are removed, and when: `Table(16, evict=LRU(capacity=1_000_000))`.

Policies check the entire table after a training lookup, so what they remove does not depend on threads or
shards. A gradient for a row that has been removed is dropped and counted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from karvan.public_names import publish

__all__ = ["LFU", "LRU", "TTL", "Age", "Eviction", "Never", "Norm"]


class Eviction(ABC):
    """A rule that removes rows."""

    @abstractmethod
    def native(self) -> tuple[str, float, int]:
        """Kind, value and steps between two checks in the terms of csrc/table/layout.h."""


def _require_positive(policy: Eviction, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{type(policy).__name__} expects {name} above 0, got {value}.")


@dataclass(frozen=True)
class Never(Eviction):
    """Rows are never removed."""

    def native(self) -> tuple[str, float, int]:
        """See `Eviction.native`."""
        return "never", 0.0, 1


@dataclass(frozen=True)
class LRU(Eviction):
    """At most `capacity` rows; removes those not used for the most steps (among these, the less used ones).

    With a capacity of 65,536 or more, a full table removes a sixteenth of its rows at once: finding them
    takes time, and the next search comes only after many insertions.
    """

    capacity: int

    def __post_init__(self) -> None:
        _require_positive(self, capacity=self.capacity)

    def native(self) -> tuple[str, float, int]:
        """See `Eviction.native`."""
        return "lru", float(self.capacity), 1


@dataclass(frozen=True)
class LFU(Eviction):
    """At most `capacity` rows; removes those with the fewest uses (then the longest unused); see `LRU`."""

    capacity: int

    def __post_init__(self) -> None:
        _require_positive(self, capacity=self.capacity)

    def native(self) -> tuple[str, float, int]:
        """See `Eviction.native`."""
        return "lfu", float(self.capacity), 1


@dataclass(frozen=True)
class Age(Eviction):
    """Removes rows whose last use is more than `steps` steps ago; checked every `every` steps.

    `Age(0)` keeps only the rows of the step at which it is checked.
    """

    steps: int
    every: int = 1000

    def __post_init__(self) -> None:
        if not self.steps >= 0:
            raise ValueError(f"Age expects steps of at least 0, got {self.steps}.")
        _require_positive(self, every=self.every)

    def native(self) -> tuple[str, float, int]:
        """See `Eviction.native`."""
        return "age", float(self.steps), self.every


def steady_time() -> float:
    """Seconds since the epoch, by the wall clock when this module was imported, and by a steady clock since.

    Setting the wall clock does not change it; time during which the machine sleeps counts.
    """
    return _IMPORTED_AT + time.clock_gettime(time.CLOCK_BOOTTIME)


_IMPORTED_AT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class TTL(Eviction):
    """Removes rows not used for `seconds`, at most 1/64 of that time late; checked every `every` steps.

    clock: the time in seconds, comparable between runs. If it falls behind the latest time that a table has
    seen, also in its checkpoint, the table's time advances by the seconds that pass, until it catches up.
    """

    seconds: float
    every: int = 1000
    clock: Callable[[], float] = field(default=steady_time, compare=False, repr=False)

    def __post_init__(self) -> None:
        _require_positive(self, seconds=self.seconds, every=self.every)

    def native(self) -> tuple[str, float, int]:
        """See `Eviction.native`."""
        return "ttl", float(self.seconds), self.every


@dataclass(frozen=True)
class Norm(Eviction):
    """Removes rows whose vector has an L2 norm under `below`; checked every `every` steps."""

    below: float
    every: int = 1000

    def __post_init__(self) -> None:
        _require_positive(self, below=self.below, every=self.every)

    def native(self) -> tuple[str, float, int]:
        """See `Eviction.native`."""
        return "norm", float(self.below), self.every


publish("karvan.embedding.eviction")
