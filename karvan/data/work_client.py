"""`WorkClient`: how a trainer or loader leases tasks from the master of its job.

It outlives the master: while none answers, a call waits and is sent again to the next one, which has the same
ledger. It waits as well while the disk of the ledger is full, and says so. So every error that is raised here
is final.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from karvan.activity import activity
from karvan.errors import is_temporary, retry_delay
from karvan.protocol import master as protocol
from karvan.wire import Client, Message, Security, WireError
from karvan.wire.schema import Call, Head
from karvan.work.ledger import JobFailedError, NoTask, TaskFailure
from karvan.work.task import Task, TaskKind, TaskLease, WorkSpec

_log = logging.getLogger(__name__)
A = TypeVar("A")

_DEADLINE = 600.0  # seconds in which a master must come back
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds until a call is repeated for which the disk had no room


class WorkClient:
    """Leases tasks under the name of this holder, which no other process has."""

    def __init__(
        self,
        find: str | Callable[[], str],
        holder: str | None = None,
        security: Security | None = None,
        *,
        deadline: float = _DEADLINE,
    ) -> None:
        self.holder = secrets.token_hex(8) if holder is None else holder
        self._leasing = threading.Lock()  # one call at a time: the next one says which leases have arrived
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}  # records by token; one thread leases while another acknowledges
        self._last = 0  # token
        self._disconnected = threading.Event()
        self._client = Client("master", find, security, deadline=deadline, forgetful=True)

    def open(self, spec: WorkSpec, drops_rest: bool = False) -> None:
        """Describe the work; the first holder of a job begins its ledger, others must say the same.

        drops_rest: if the ledger is of other data, begin this data, whatever is left of that.
        """
        self._call(protocol.OPEN_WORK, protocol.OpenWork(spec=asdict(spec), drops_rest=drops_rest))

    def lease(
        self, kinds: Iterable[TaskKind] = (TaskKind.TRAIN,), most: int = 1, epoch: int | None = None
    ) -> list[TaskLease] | NoTask:
        """Up to `most` tasks, or the answer why there is none; with `epoch`, only tasks of that one.

        A JobFailedError if the job has failed.
        """
        with self._leasing:
            head = protocol.LeaseTasks(
                holder=self.holder, last_token=self._last, kinds=list(kinds), most=most, epoch=epoch
            )
            got = self._call(protocol.LEASE_TASKS, head).head
            tasks = {lease.token: task_from(lease.task) for lease in got.leases}
            with self._lock:
                self._held.update({token: task.records for token, task in tasks.items()})
                self._last = max([self._last, *tasks])
        if got.answer == "failed":
            raise JobFailedError(got.failure)
        return [TaskLease(token, self.holder, task) for token, task in tasks.items()] or NoTask(got.answer)

    def acknowledge(self, done: Mapping[int, int]) -> list[int]:
        """Report how many records are done, by token; returns the tokens of leases that have ended."""
        ended: list[int] = []
        pairs = list(done.items())
        for first in range(0, len(pairs), protocol.MOST_LEASES):
            head = protocol.DoneRecords(holder=self.holder, done=pairs[first : first + protocol.MOST_LEASES])
            ended += self._call(protocol.ACKNOWLEDGE_RECORDS, head).head.ended
        with self._lock:
            finished = [token for token, count in done.items() if self._held.get(token) == count]
        self._forget([*ended, *finished])
        return ended

    def give_back(self, tokens: Iterable[int]) -> None:
        """End leases that will not be finished here."""
        tokens = list(tokens)
        for first in range(0, len(tokens), protocol.MOST_LEASES):
            some = tokens[first : first + protocol.MOST_LEASES]
            self._call(protocol.GIVE_BACK_TASKS, protocol.ReturnedLeases(holder=self.holder, tokens=some))
        self._forget(tokens)

    def give_back_all(self) -> None:
        """End all leases that are held here."""
        with self._lock:
            leases = list(self._held)
        self.give_back(leases)

    def fail(
        self, token: int, error: str, record: int | None = None, number: int | None = None
    ) -> TaskFailure:
        """Report that a task raised an error; see `Ledger.fail`."""
        text = error[: protocol.MOST_ERROR]
        head = protocol.FailedLease(
            holder=self.holder, token=token, error=text, record=record, number_in_file=number
        )
        answer = self._call(protocol.FAIL_TASK, head).head
        self._forget([token])
        return TaskFailure(**vars(answer))

    def begin_evaluation(self, number: int, parts: Iterable[tuple[str, int]], records_per_task: int) -> None:
        """Take part in an evaluation, whose tasks can be leased then; see `Ledger.begin_evaluation`."""
        head = protocol.BeginEvaluation(
            holder=self.holder, evaluation=number, parts=list(parts), records_per_task=records_per_task
        )
        self._call(protocol.BEGIN_EVALUATION, head)

    def begin_prediction(self, number: int, parts: Iterable[tuple[str, int]], records_per_task: int) -> bool:
        """Take part in a prediction; False: others are still in the one before, so ask again."""
        head = protocol.BeginPrediction(
            holder=self.holder, prediction=number, parts=list(parts), records_per_task=records_per_task
        )
        return self._call(protocol.BEGIN_PREDICTION, head).head.begun

    @contextmanager
    def export(self) -> Iterator[None]:
        """While this process makes the final checkpoint of the job; an error leaves it to be made again."""
        token = self._call(protocol.BEGIN_EXPORT, protocol.Holder(holder=self.holder)).head.token
        with self._lock:
            self._held[token], self._last = 0, max(self._last, token)
        yield
        self.acknowledge({token: 0})

    def take_position(self) -> str:
        """The ledger's position, for a checkpoint: JSON."""
        return self._call(protocol.TAKE_POSITION, protocol.Holder(holder=self.holder)).head.state

    def restore_position(self, state: str | None) -> None:
        """Return to the position of a checkpoint; None: to the beginning. All leases end."""
        self._call(protocol.RESTORE_POSITION, protocol.RestorePosition(holder=self.holder, state=state))
        with self._lock:
            self._held.clear()

    def _forget(self, tokens: Iterable[int]) -> None:
        with self._lock:
            for token in tokens:
                self._held.pop(token, None)

    def close(self) -> None:
        """Give back what is held, and disconnect."""
        self.give_back_all()
        self.disconnect()

    def disconnect(self) -> None:
        """Disconnect; leases stay until they are acknowledged, by whomever, or taken back."""
        self._disconnected.set()
        self._client.close()

    def _call(self, call: Call[Any, A], head: Head) -> Message[A]:
        """Call the master; returns when the disk of the ledger has taken the change."""
        attempt = 0
        while True:
            try:
                return self._client.call(call, head)
            except WireError:
                raise
            except OSError as error:
                if not is_temporary(error) or self._disconnected.is_set():
                    raise
                if not attempt:
                    _log.warning("%s. This process waits until it can be.", error.strerror)
            with activity.waiting("master"):
                self._disconnected.wait(retry_delay(_FIRST_PAUSE, attempt, _LONGEST_PAUSE))
            attempt += 1


def task_from(fields: Mapping[str, Any]) -> Task:
    """The task that a message describes."""
    return Task(**{**fields, "kind": TaskKind(fields["kind"]), "skipped": tuple(fields["skipped"])})
