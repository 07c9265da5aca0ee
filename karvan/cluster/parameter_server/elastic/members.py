"""`Members`: which trainers of an elastic run a server has heard of, and whose calls it refuses.

    fence      a member may be gone. Whatever still comes from it is refused, but what it has staged stays, so
               that the others can find out how far it came, and commit its last step where it has not.
    abandon    it is settled what a member has done: the server drops the rest

A trainer that was only silent may wake at any moment. From the fence on it cannot commit anything that the
others decide against meanwhile. And as soon as one of the others has entered a newer round than it knows of,
it is not told who the members are, so it cannot take those who have joined meanwhile for gone.
"""

from __future__ import annotations

from karvan.outages import mark
from karvan.wire import RefusedError


class Members:
    """The members of one run, by number; numbers are never used again."""

    def __init__(self) -> None:
        self._trained: set[int] = set()
        self.fenced: set[int] = set()
        self._abandoned: set[int] = set()
        self._round = 0

    @property
    def known(self) -> list[int]:
        """Those that have trained with this server, or are fenced, and are not abandoned."""
        return sorted((self._trained | self.fenced) - self._abandoned)

    def expect(self, member: int) -> None:
        """A RefusedError if a member is fenced or abandoned."""
        if member in self._abandoned or member in self.fenced:
            how = "abandoned" if member in self._abandoned else "fenced off"
            raise _left_behind(f"expected a member of the run, got member {member}, {how} by the others.")

    def enter_round(self, number: int) -> None:
        """A member has entered a round; a RefusedError if others have entered a newer one."""
        if number < self._round:
            raise _left_behind(
                f"expected a member of round {self._round}, like the others, got one of round {number}."
            )
        self._round = number

    def note(self, member: int) -> None:
        """A member trains."""
        self._trained.add(member)

    def fence(self, member: int) -> None:
        """Refuse the calls of a member."""
        self.fenced.add(member)

    def abandon(self, member: int) -> None:
        """Refuse them, and forget the member otherwise."""
        self._abandoned.add(member)
        self.fenced.discard(member)


def _left_behind(text: str) -> RefusedError:
    """Temporary: its process was out of reach, and another one may replace it."""
    return mark(RefusedError(text), True)
