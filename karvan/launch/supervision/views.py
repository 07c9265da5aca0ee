"""What a supervisor knows of the registry, the leased work and the group of trainers of its job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from karvan.job.roles import Role
from karvan.launch.supervision.health import HealthSource
from karvan.work.task import Task, TaskLease


class RegistryView(HealthSource, Protocol):
    """Where roles find each other; it also knows which of them are healthy."""

    @property
    def address(self) -> str:
        """host:port."""

    def forget(self, role: Role, index: int) -> None:
        """A process has ended; another one will replace it."""

    def begin_generation(self, generation: int) -> None:
        """Trainers are restarted, and rendezvous again."""


class WorkView(Protocol):
    """The leased work of a job."""

    def release_process(self, process_holder: str) -> list[Task]:
        """A process has died: its tasks wait for others. Returns them."""

    def release_predictions(self, process_holder: str) -> bool:
        """A process has died: its prediction tasks wait. Returns whether others predict, who continue."""

    def has_work(self) -> bool:
        """Whether processes have described work to lease."""

    def is_complete(self) -> bool:
        """Whether no work is left."""

    def overdue(self, spared: Callable[[str], bool]) -> list[TaskLease]:
        """End leases of which nothing was heard for too long; returns them."""


class GroupView(Protocol):
    """The trainers that train together, if they come and go."""

    def has_begun(self) -> bool:
        """Whether trainers train together; until then nothing is lost with one of them."""

    def remove(self, process: str) -> bool:
        """A process has ended. Returns whether others are left, who continue without it."""

    def has_left(self, process: str) -> bool:
        """Whether a process has left the others before the end of training."""

    def is_member(self, process: str) -> bool:
        """Whether a process trains with others, or may do so soon."""

    def trains(self, process: str) -> bool:
        """Whether a process is in the current round."""

    def expect(self, trainers: int) -> None:
        """No more than this many trainers will come."""


class NoGroup:
    """A job whose trainers cannot do without each other."""

    def has_begun(self) -> bool:
        """They cannot start without each other."""
        return True

    def remove(self, process: str) -> bool:
        """Nobody continues."""
        return False

    def has_left(self, process: str) -> bool:
        """Nobody leaves."""
        return False

    def is_member(self, process: str) -> bool:
        """Nobody comes and goes."""
        return False

    def trains(self, process: str) -> bool:
        """Each may train."""
        return True

    def expect(self, trainers: int) -> None:
        """Nobody waits for others."""


class NoWork:
    """A job without leased work."""

    def release_process(self, process_holder: str) -> list[Task]:
        """Nobody holds anything."""
        return []

    def release_predictions(self, process_holder: str) -> bool:
        """Nobody predicts."""
        return False

    def has_work(self) -> bool:
        """There is none."""
        return False

    def is_complete(self) -> bool:
        """There is none."""
        return True

    def overdue(self, spared: Callable[[str], bool]) -> list[TaskLease]:
        """Nothing is late."""
        return []
