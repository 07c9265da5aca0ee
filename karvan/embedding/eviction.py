"""Which rows are removed, and when: `kv.Table(16, evict=kv.eviction.LRU(capacity=1_000_000))`.

Policies check the entire table after a training lookup, so what they remove does not depend on threads or
shards. A gradient for a row that has been removed is dropped and counted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from karvan.argument_checks import publish

__all__ = ["Never", "LRU", "LFU", "TTL", "Age", "Norm", "Eviction"]


class Eviction(ABC):
    """The base class of rules that remove rows.

    Example:
        >>> isinstance(kv.eviction.Never(), kv.eviction.Eviction)
        True
    """

    @abstractmethod
    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core.

        Returns:
            Kind, value and steps between two checks of `csrc/table/layout.h`.
        """


def _require_positive(policy: Eviction, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{type(policy).__name__} expects {name} above 0, got {value}.")


@dataclass(frozen=True)
class Never(Eviction):
    """Rows are never removed.

    It is the default of tables.

    Example:
        >>> table = kv.Table(dim=16, evict=kv.eviction.Never())
    """

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return "never", 0.0, 1


@dataclass(frozen=True)
class _Capacity(Eviction):
    capacity: int
    _kind: ClassVar[str]

    def __post_init__(self) -> None:
        _require_positive(self, capacity=self.capacity)

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return self._kind, float(self.capacity), 1


@dataclass(frozen=True)
class LRU(_Capacity):
    """At most `capacity` rows: the least recently used rows are removed.

    Of rows that were last used at the same step, those with fewer uses go first. With a capacity of 65,536 or
    more, a full table removes a sixteenth of its rows at once.

    Args:
        capacity: The most rows of the table.

    Example:
        >>> engine = kv.EmbeddingEngine(
        ...     {"user": kv.Table(dim=4, evict=kv.eviction.LRU(capacity=2))}
        ... )
        >>> for user in [7, 8, 9]:
        ...     vectors = engine({"user": torch.tensor([user])})
        >>> sorted(engine.table("user").keys().tolist())
        [8, 9]
    """

    _kind = "lru"


@dataclass(frozen=True)
class LFU(_Capacity):
    """At most `capacity` rows: the least frequently used rows are removed.

    Of rows with equal uses, those that were not used for longer go first. With a capacity of 65,536 or more,
    a full table removes a sixteenth of its rows at once.

    Args:
        capacity: The most rows of the table.

    Example:
        >>> table = kv.Table(dim=16, evict=kv.eviction.LFU(capacity=1_000_000))
    """

    _kind = "lfu"


@dataclass(frozen=True)
class Age(Eviction):
    """Remove rows that were not used for a number of steps.

    Args:
        steps: How many steps ago the last use may be. 0 keeps only the rows of the step at which it is
            checked.
        every: How many steps are between two checks.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> table = kv.Table(dim=16, evict=kv.eviction.Age(steps=100_000))
    """

    steps: int
    every: int = 1000

    def __post_init__(self) -> None:
        if not self.steps >= 0:
            raise ValueError(f"Age expects steps of at least 0, got {self.steps}.")
        _require_positive(self, every=self.every)

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return "age", float(self.steps), self.every


def steady_time() -> float:
    """Seconds since the epoch, by the wall clock when this module was imported, and by a steady clock since.

    Setting the wall clock does not change it; time during which the machine sleeps counts.
    """
    return _IMPORTED_AT + time.clock_gettime(time.CLOCK_BOOTTIME)


_IMPORTED_AT = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class TTL(Eviction):
    """Remove rows that were not used for a time, at most 1/64 of that time late.

    Args:
        seconds: How long ago the last use may be.
        every: How many steps are between two checks.
        clock: What gives the time in seconds, comparable between runs. If it falls behind the latest time
            that a table has seen, also in its checkpoint, the table's time advances by the seconds that pass
            until it catches up.

    Example:
        >>> table = kv.Table(dim=16, evict=kv.eviction.TTL(seconds=30 * 86_400))
    """

    seconds: float
    every: int = 1000
    clock: Callable[[], float] = field(default=steady_time, compare=False, repr=False)

    def __post_init__(self) -> None:
        _require_positive(self, seconds=self.seconds, every=self.every)

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return "ttl", float(self.seconds), self.every


@dataclass(frozen=True)
class Norm(Eviction):
    """Remove rows with small vectors.

    Args:
        below: The L2 norm under which a row is removed.
        every: How many steps are between two checks.

    Example:
        >>> table = kv.Table(dim=16, evict=kv.eviction.Norm(below=0.001))
    """

    below: float
    every: int = 1000

    def __post_init__(self) -> None:
        _require_positive(self, below=self.below, every=self.every)

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return "norm", float(self.below), self.every


publish("karvan.embedding.eviction")
