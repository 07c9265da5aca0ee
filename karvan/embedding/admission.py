"""Which unknown keys get a row: `Table(16, admit=MinCount(2))`.

A key that is not admitted has a zero vector and takes no memory; its gradient is ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from karvan.public_names import publish

__all__ = ["Admission", "Always", "MinCount", "Probability", "ReadOnly"]


class Admission(ABC):
    """A rule for unknown keys in training lookups."""

    @abstractmethod
    def native(self) -> tuple[str, float, int]:
        """Kind, value and filter slots in the terms of csrc/table/layout.h."""


@dataclass(frozen=True)
class Always(Admission):
    """Every key gets a row at its first occurrence."""

    def native(self) -> tuple[str, float, int]:
        """See `Admission.native`."""
        return "always", 0.0, 0


@dataclass(frozen=True)
class Probability(Admission):
    """A share `p` of all keys get rows; the key's hash decides, so the choice is the same every time.

    each: draw again at every step in which a key without a row occurs, so that it gets one with probability
    `p` each time, and frequent keys sooner or later, as in PERSIA. The draw is a function of the engine's
    seed, the table's name, the key and the step (the number of the training lookup; how often the key occurs
    in it does not matter), so a run that is repeated admits the same keys at the same steps, on any number of
    shards, servers and devices. Trainers that are at the same step draw the same.
    """

    p: float
    each: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"Probability expects p from 0 to 1, got {self.p}.")

    def native(self) -> tuple[str, float, int]:
        """See `Admission.native`."""
        return "probability_each" if self.each else "probability", float(self.p), 0


@dataclass(frozen=True)
class MinCount(Admission):
    """A key gets a row with its n-th occurrence in training.

    Occurrences of keys without a row are counted in a filter of `slots` bytes, shared by all of them. Keys
    may share counters, so some get their row early, never late; give about ten slots for each distinct rare
    key you expect.
    """

    n: int
    slots: int = 1 << 24

    def __post_init__(self) -> None:
        if not 1 <= self.n <= 255:
            raise ValueError(f"MinCount expects n from 1 to 255, got {self.n}.")
        if self.slots < 1:
            raise ValueError(f"MinCount expects at least one slot, got {self.slots}.")

    def native(self) -> tuple[str, float, int]:
        """See `Admission.native`."""
        return "min_count", float(self.n), self.slots


@dataclass(frozen=True)
class ReadOnly(Admission):
    """No new key gets a row; existing rows continue to learn."""

    def native(self) -> tuple[str, float, int]:
        """See `Admission.native`."""
        return "read_only", 0.0, 0


publish("karvan.embedding.admission")
