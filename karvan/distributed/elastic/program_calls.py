"""Which fit or prediction of its program a trainer is in, and what follows if others are elsewhere.

All trainers run the same program, so they count the same *calls*: its fits, and its predictions of leased
data. One that was started again begins at the first call, while others are in a later one.

When trainers meet in a round, each says its `Standing`. Those that *know* the state of training, because they
train or have trained, share it with the others. A trainer that does not know it, and is in an earlier call
than all who do, skips the calls up to the earliest of theirs: what they were for is done. Those in a later
call than others wait for these in the next round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class ProgramCalls:
    """The calls of this process."""

    def __init__(self) -> None:
        self.last = 0  # the number of the call in progress, or of the last one
        self.passed = 0  # the first call that is not over: other trainers were in it or in later ones
        self.in_fit = False
        self.finished = 0  # fits
        self.predicts = False  # whether an iterator of predictions is open

    @contextmanager
    def fit(self) -> Iterator[int]:
        """While this process is in a fit; gives its number."""
        self.last += 1
        self.in_fit = True
        try:
            yield self.last
            self.finished += 1
        finally:
            self.in_fit = False

    def begin_prediction(self) -> int:
        """The number of the next prediction."""
        self.last += 1
        return self.last


@dataclass(frozen=True)
class Standing:
    """How far a trainer is, for JSON.

    begun: it has the state of the fit that it is in, or of the last one if it predicts. knows: it has it, or
    has finished a fit before. actions: how many of the fit are complete; last: the last one, and its result.
    """

    call: int
    begun: bool
    knows: bool
    actions: int
    last: dict[str, Any] | None


class Standings:
    """Those of all trainers of a round, in the order of ranks."""

    def __init__(self, said: Sequence[Standing]) -> None:
        self._said = said
        self.leader = max(
            range(len(said)),
            key=lambda rank: (said[rank].begun, said[rank].knows, said[rank].call, said[rank].actions, -rank),
        )

    @property
    def first(self) -> Standing:
        """That of the leader, who is farthest of all that have the state, and shares it."""
        return self._said[self.leader]

    @property
    def together(self) -> bool:
        """Whether all are in the same call."""
        return all(each.call == self.first.call for each in self._said)

    @property
    def passed(self) -> int:
        """The earliest call of those that know the state of training; 0 if nobody does."""
        return min((each.call for each in self._said if each.knows), default=0)

    def receives(self, rank: int) -> bool:
        """Whether a trainer gets the state from the leader, or would if it were another."""
        its = self._said[rank]
        return not its.begun and (its.call == self.first.call or not its.knows)

    @property
    def shares(self) -> bool:
        """Whether somebody gets the state from the leader."""
        return any(self.receives(rank) for rank in range(len(self._said)))

    def ahead_of(self, call: int) -> list[int]:
        """The ranks in later calls."""
        return [rank for rank, each in enumerate(self._said) if each.call > call]
