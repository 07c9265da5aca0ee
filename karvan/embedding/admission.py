"""Which unknown keys get a row: `kv.Table(16, admit=kv.admission.MinCount(2))`.

A key that is not admitted has a zero vector and takes no memory. Its gradient is ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from karvan.argument_checks import publish

__all__ = ["Always", "MinCount", "Probability", "ReadOnly", "Admission"]


class Admission(ABC):
    """The base class of rules for unknown keys in training lookups.

    Example:
        >>> isinstance(kv.admission.Always(), kv.admission.Admission)
        True
    """

    @abstractmethod
    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core.

        Returns:
            Kind, value and filter slots of `csrc/table/layout.h`.
        """


@dataclass(frozen=True)
class Always(Admission):
    """Every key gets a row at its first occurrence.

    It is the default of tables.

    Example:
        >>> table = kv.Table(dim=16, admit=kv.admission.Always())
    """

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return "always", 0.0, 0


@dataclass(frozen=True)
class Probability(Admission):
    """A share of all keys get rows.

    The key's hash decides, so the choice is the same every time.

    Args:
        p: The share, from 0 to 1.
        each: Whether to draw again at every step in which a key without a row occurs, as PERSIA does.
            Frequent keys then get a row sooner or later. The draw depends on the engine's seed, the table's
            name, the key and the step, so a run that is repeated admits the same keys at the same steps.

    Raises:
        ValueError: `p` is out of range.

    Example:
        >>> table = kv.Table(dim=16, admit=kv.admission.Probability(0.1, each=True))
    """

    p: float
    each: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"Probability expects p from 0 to 1, got {self.p}.")

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return "probability_each" if self.each else "probability", float(self.p), 0


@dataclass(frozen=True)
class MinCount(Admission):
    """A key gets a row with its n-th occurrence in training.

    Occurrences of keys without a row are counted in a filter. Keys may share counters, so some get their row
    early, never late.

    Args:
        n: How often a key must occur, from 1 to 255.
        slots: The size of the filter in bytes. Give about ten for each distinct rare key that you expect.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> engine = kv.EmbeddingEngine(
        ...     {"user": kv.Table(dim=4, admit=kv.admission.MinCount(2))}
        ... )
        >>> vectors = engine({"user": torch.tensor([7, 8])})
        >>> vectors = engine({"user": torch.tensor([7, 9])})
        >>> engine.table("user").keys()
        tensor([7])
    """

    n: int
    slots: int = 1 << 24

    def __post_init__(self) -> None:
        if not 1 <= self.n <= 255:
            raise ValueError(f"MinCount expects n from 1 to 255, got {self.n}.")
        if self.slots < 1:
            raise ValueError(f"MinCount expects at least one slot, got {self.slots}.")

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        if self.n == 1:  # needs no filter
            return Always().native()
        return "min_count", float(self.n), self.slots


@dataclass(frozen=True)
class ReadOnly(Admission):
    """No new key gets a row.

    Existing rows continue to learn.

    Example:
        >>> table = kv.Table(dim=16, admit=kv.admission.ReadOnly())
    """

    def native(self) -> tuple[str, float, int]:
        """Return the rule for the native core."""
        return "read_only", 0.0, 0


publish("karvan.embedding.admission")
