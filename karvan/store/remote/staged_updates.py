"""`StagedUpdates`: in an elastic run, updates are staged at the servers until their step is committed.

The program's side is `karvan.distributed.parameter_servers`: it says which step updates belong to, finds
what was staged, and commits. Here gradients are sent, and held until the commit, so that they can be sent
again if the step is dropped. For the bound on staleness a batch is in flight until its step is committed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from karvan.distributed.parameter_servers import StepCommits
from karvan.native import _native
from karvan.store.remote.servers import ServerBatches, ServerLookup
from karvan.store.remote.staleness_window import Countdown, StalenessWindow
from karvan.store.remote.workers import Sent, WorkerBatches, WorkerLookup

Lookups: TypeAlias = Sequence[ServerLookup | WorkerLookup]
Sums: TypeAlias = "Sequence[_native.Gradients | Sent]"


@dataclass
class StagedUpdates:
    """The staged updates of one store; at_workers: the batches whose ids embedding workers hold, if any."""

    commits: StepCommits
    _at_servers: ServerBatches
    _at_workers: WorkerBatches | None
    _window: StalenessWindow
    _servers: int  # how many

    def stage(self, head: Mapping[str, Any], lookups: Lookups, gradients: Sums) -> StagedUpdate:
        """Send gradients to the servers, for the step that has begun, without waiting.

        Those of a batch whose ids a worker holds go to that worker, which stages them at all servers.

        They are not divided by the number of trainers: the commit has their factor.
        """
        head = {**head, "step": self.commits.step, "sequence": self.commits.next_sequence()}
        staged = StagedUpdate(self, head, lookups, gradients)
        self.commits.add(staged)
        server_lookups = [lookup for lookup in lookups if isinstance(lookup, ServerLookup)]
        away = [lookup for lookup in lookups if isinstance(lookup, WorkerLookup)]
        workers = {lookup.reference.worker for lookup in away}
        if len(workers) + bool(server_lookups) > 1:
            raise RuntimeError(
                "Expected the passes of an elastic run's update to be looked up by one process, this trainer "
                f"or one embedding worker, got {len(server_lookups)} of this trainer and "
                f"{len(away)} of workers."
            )
        if server_lookups:
            sums = [gradient for gradient in gradients if isinstance(gradient, _native.Gradients)]
            pending = Countdown(self._servers, staged.note_staged, staged.note_failure)
            self._at_servers.push(head, server_lookups, sums, 1.0, pending)
        else:
            assert self._at_workers is not None
            sent = [gradient for gradient in gradients if isinstance(gradient, Sent)]
            all_passes = {**head, "mine": list(range(len(away)))}
            pending = Countdown(1, staged.note_staged, staged.note_failure)
            self._at_workers.push(workers.pop(), all_passes, away, sent, pending)
        return staged

    def end(self, lookups: Lookups) -> None:
        """The batches of these lookups are not in flight any more."""
        self._window.end([lookup.number for lookup in lookups])

    def note_failure(self, error: Exception) -> None:
        """No more lookups will work, either."""
        self._window.fail(error)


class StagedUpdate:
    """One update, with what is needed to send it again."""

    def __init__(
        self, updates: StagedUpdates, head: Mapping[str, Any], lookups: Lookups, gradients: Sums
    ) -> None:
        self._updates = updates
        self._head = head
        self._lookups, self._gradients = lookups, gradients
        self._answered = threading.Event()
        self._error: Exception | None = None
        self.step = int(head["step"])
        self.sequence = int(head["sequence"])

    @property
    def part(self) -> tuple[int, int]:
        """Member and sequence, as commits name it."""
        return self._updates.commits.member, self.sequence

    def note_staged(self) -> None:
        """All servers hold it."""
        self._answered.set()

    def note_failure(self, error: Exception) -> None:
        """A server could not stage it."""
        self._error = self._error or error
        self._answered.set()
        self._updates.note_failure(error)

    def wait(self) -> None:
        """Return when all servers hold it; raises what went wrong."""
        self._answered.wait()
        if self._error is not None:
            raise self._error

    def restage(self) -> StagedUpdate:
        """Send the same gradients again, under a new number, for the step that has begun.

        For a push whose step was dropped; this one is forgotten.
        """
        if not self._lookups:
            raise RuntimeError(
                f"Expected an update that can be staged again, got push {self.sequence} of step {self.step}, "
                "which was committed or released."
            )
        self._updates.commits.forget(self)
        return self._updates.stage(self._head, self._lookups, self._gradients)

    def release(self) -> None:
        """Its step is committed, or given up: the lookups and gradients are not needed any more."""
        self._updates.commits.forget(self)
        lookups, self._lookups, self._gradients = self._lookups, (), ()
        self._updates.end(lookups)
