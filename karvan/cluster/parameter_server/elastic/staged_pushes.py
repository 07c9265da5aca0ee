"""`StagedPushes`: the gradients that a server holds until the trainers commit or drop their step.

A push is known by its member and sequence. It is staged once, however often it is sent; one that a step was
committed with is remembered, so that a late repetition is answered as done and not staged again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from karvan.cluster.parameter_server.answer_window import AnswerWindow
from karvan.store.exchange.row_owner import Answered
from karvan.store.types import Keys, Vectors
from karvan.wire import RefusedError


@dataclass(frozen=True, eq=False)
class HeldLookup:
    """A member's training lookup, held until the member is done with it.

    answered: the lookup in the tables, unless it has changed nothing in them.
    """

    tables: Sequence[str]
    counts: Sequence[int]
    dims: Sequence[int]
    keys: Keys  # and their uses: the message of the lookup
    step: int
    now: float
    vectors: Tensor
    answered: Answered | None = None


@dataclass(frozen=True, eq=False)
class StagedPush:
    """Gradients of some lookups, one for each backward pass, not multiplied by the step's scale."""

    member: int
    sequence: int
    step: int
    store: int
    batches: Sequence[int]
    lookups: Sequence[HeldLookup]
    gradients: Sequence[Vectors]
    rules: Mapping[str, Mapping[str, Any]]
    steps: Mapping[str, int]
    skipped: Sequence[str]
    complete: bool

    @property
    def name(self) -> tuple[int, int]:
        """How commits call it."""
        return self.member, self.sequence


class StagedPushes:
    """Staged pushes by member and sequence; a member has at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._staged: dict[tuple[int, int], StagedPush] = {}
        self._committed: AnswerWindow[bool] = AnswerWindow(most)

    def __len__(self) -> int:
        return len(self._staged)

    def holds(self, member: int, sequence: int, step: int, batches: Sequence[int]) -> bool:
        """Whether a push has been staged or committed before; a RefusedError if it must not be staged."""
        if self._committed.find(str(member), sequence):
            return True
        if (known := self._staged.get((member, sequence))) is not None:
            if (known.step, known.batches) != (step, batches):
                raise RefusedError(
                    f"expected push {sequence} of member {member} to be repeated as it was, of step "
                    f"{known.step} and batches {known.batches}, got step {step} and batches {batches}."
                )
            return True
        if self._committed.forgotten(str(member), sequence):
            raise RefusedError(f"expected one of member {member}'s newest pushes, got {sequence}.")
        staged = sum(other == member for other, _ in self._staged)
        if staged >= self._most:
            raise RefusedError(
                f"expected at most {self._most} staged pushes of a member, got one more of member {member}: "
                "commit or drop its steps first."
            )
        return False

    def add(self, push: StagedPush) -> None:
        """Stage a push that is not held yet."""
        self._staged[push.name] = push

    def find(self, names: Iterable[tuple[int, int]], step: int) -> list[StagedPush]:
        """These pushes, in this order; a RefusedError unless all are staged, and of the step."""
        found = []
        for member, sequence in names:
            push = self._staged.get((member, sequence))
            if push is None:
                raise RefusedError(
                    f"expected parts of step {step} that are staged, got push {sequence} of member {member}, "
                    "which is not here: its gradients would be lost."
                )
            if push.step != step:
                raise RefusedError(
                    f"expected parts of step {step}, got push {sequence} of member {member}, of step "
                    f"{push.step}."
                )
            found.append(push)
        return found

    def commit(self, parts: Iterable[StagedPush]) -> None:
        """These have been applied."""
        for part in parts:
            del self._staged[part.name]
            self._committed.remember(str(part.member), part.sequence, True)

    def drop(self, chosen: Callable[[StagedPush], bool]) -> list[StagedPush]:
        """Remove and return the pushes for which `chosen` is true."""
        dropped = [push for push in self._staged.values() if chosen(push)]
        for push in dropped:
            del self._staged[push.name]
        return dropped

    def forget(self, member: int) -> None:
        """Forget the committed pushes of a member that will not come back."""
        self._committed.forget(str(member))

    def uses(self, lookup: HeldLookup) -> bool:
        """Whether a staged push has gradients of a lookup."""
        return any(lookup is each for push in self._staged.values() for each in push.lookups)

    def names(self, chosen: Callable[[StagedPush], bool]) -> list[tuple[int, int, int]]:
        """Step, member and sequence of staged pushes, sorted."""
        return sorted((push.step, *push.name) for push in self._staged.values() if chosen(push))
