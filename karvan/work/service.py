"""`WorkService`: the calls by which trainers and loaders lease tasks of the ledger.

A holder is a process, under a name of its own. It calls

    lease        for tasks of some kinds. It says which leases it knows: any others of its name were answered
                 by a master that died before the answer arrived, and are answered again.
    acknowledge  how many records of its tasks are done. The answer names leases that have ended: the holder
                 drops them, because somebody else has their records.
    give_back    leases that it will not finish, because it leaves.
    fail         a task whose records raise an error.

"wait" means: ask again, others still work on this epoch. "done" means that nothing will follow. A network
error means neither: the holder calls again until the master is back.

A lease ends when its holder is reported dead (`release`), or when nothing was acknowledged of it for
`patience` seconds, or for three times as long as the slowest task took if that is more: its holder hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from karvan.clock import clock
from karvan.protocol.work import WORK_CALLS
from karvan.wire import Message, RefusedError, Request, Service, endpoints
from karvan.work.ledger import Answer, JobFailedError, Ledger
from karvan.work.task import Lease, Task, TaskKind

PATIENCE = 300.0
_SLOWEST_TIMES = 3.0


class WorkService(Service):
    """Serves a ledger. All changes go through one lock, and are on disk before they are answered."""

    name = "work"
    progresses = False

    def __init__(
        self, ledger: Ledger, *, patience: float = PATIENCE, now: Callable[[], float] = clock.now
    ) -> None:
        self._ledger = ledger
        self._patience = patience
        self._now = now
        self._lock = threading.Lock()
        self._begun: dict[
            int, float
        ] = {}  # when a lease began, by token; unknown for those of the last master
        self._heard = {lease.token: now() for lease in ledger.leases}  # when there was progress, by token
        self._slowest = 0.0
        self.endpoints = endpoints(
            WORK_CALLS,
            {
                "lease": self._lease,
                "acknowledge": self._acknowledge,
                "give_back": self._give_back,
                "fail": self._fail,
            },
        )

    def release(self, holder: str) -> list[Task]:
        """A holder has died or left: its tasks wait."""
        with self._lock:
            tokens = [lease.token for lease in self._ledger.leases_of(holder)]
            tasks = self._ledger.release(holder)
            self._forget(tokens)
            return tasks

    def overdue(self) -> list[Lease]:
        """End the leases of which nothing was heard for too long; their holders hang, and are returned."""
        with self._lock:
            limit = max(self._patience, _SLOWEST_TIMES * self._slowest)
            now = self._now()
            late = [lease for lease in self._ledger.leases if now - self._heard[lease.token] > limit]
            tokens = [lease.token for lease in late]
            self._ledger.give_back(tokens)
            self._forget(tokens)
            return late

    def _lease(self, request: Request) -> Message:
        head = request.head
        holder, known = head["holder"], set(head["holds"])
        kinds = frozenset(map(TaskKind, head["kinds"]))
        with self._lock:
            leases = [lease for lease in self._ledger.leases_of(holder) if lease.token not in known]
            if leases:
                return Message({"leases": [_as_json(lease) for lease in leases], "answer": "tasks"})
            try:
                made = self._ledger.lease(holder, kinds, head["most"])
            except JobFailedError as error:
                raise RefusedError(f"The job has failed: {error}") from None
            if isinstance(made, Answer):
                return Message({"leases": [], "answer": made.value})
            now = self._now()
            for lease in made:
                self._begun[lease.token] = self._heard[lease.token] = now
        return Message({"leases": [_as_json(lease) for lease in made], "answer": "tasks"})

    def _acknowledge(self, request: Request) -> Message:
        done = dict(request.head["done"])
        with self._lock:
            try:
                ended = self._ledger.acknowledge(done)
            except ValueError as error:
                raise RefusedError(str(error)) from None
            now = self._now()
            for token in done:
                if self._ledger.is_leased(token):
                    self._heard[token] = now
                elif token in self._begun:
                    self._slowest = max(self._slowest, now - self._begun[token])
            self._forget(done)
        return Message({"ended": ended})

    def _give_back(self, request: Request) -> Message:
        with self._lock:
            mine = {lease.token for lease in self._ledger.leases_of(request.head["holder"])}
            tokens = mine.intersection(request.head["tokens"])
            self._ledger.give_back(tokens)
            self._forget(tokens)
        return Message({})

    def _fail(self, request: Request) -> Message:
        head = request.head
        with self._lock:
            try:
                again = self._ledger.fail(head["token"], head["error"], head["record"])
            except ValueError as error:
                raise RefusedError(str(error)) from None
            self._forget([head["token"]])
        return Message({"again": again})

    def _forget(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not self._ledger.is_leased(token):
                self._begun.pop(token, None)
                self._heard.pop(token, None)


def _as_json(lease: Lease) -> dict[str, Any]:
    return {"token": lease.token, "task": {**lease.task._asdict(), "skipped": list(lease.task.skipped)}}
