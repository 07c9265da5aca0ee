"""`Ledger`: which tasks of a job are open, who holds them, and which records are done.

```
   plan ──issue──►  leased  ──acknowledge all records──►  done (removed)
                    │    ▲
       released,    │    │ lease, under a new token
       failed,      ▼    │
       expired    waiting
```

- **Leases.** A task is leased to one holder at a time. Every lease has a token of its own, larger than all
  before it: a report with the token of a lease that has ended changes nothing.
- **Acknowledging.** A holder reports how many records of a task are done, in the order in which the task
  hands them out. If its lease ends early, the task waits with the records that are left.
- **Epochs.** The tasks of an epoch are issued when all tasks of the epoch before are done. Until then whoever
  asks is told to wait.
- **Failures.** A holder that dies, leaves or falls silent costs a task nothing, however often. A task that
  *fails* does so `most_tries` times at most; then the job has failed, and says which records it was.
- **Bad records.** A failure that names a record skips it instead, for up to `skip_bad_records` records of the
  job; each is counted, and its task remembers it.
- **Evaluations.** Trainers begin one (`begin_evaluation`), and lease its tasks. It is theirs to know when
  it is complete: tasks of an earlier one end when the next begins.
- **Predictions.** Trainers begin one (`begin_prediction`), and lease its tasks until all of its records are
  acknowledged. Nothing undoes a prediction: a checkpoint has none of it, and going back to one leaves it as
  it is, except that its leases end.
- **End.** After the last epoch there is one export task, the final checkpoint, and then nothing. Where
  trainers decide when the job ends, they ask for it (`begin_export`). It is done when the checkpoint is
  complete; if its holder dies before, another one makes it.

Every change is one transaction of the `LedgerFile`, before it is answered. Memory and file hold only the
open tasks. Deadlines are not stored: after a restart every holder has its full time again.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from karvan.work.task import NO_WORK, Task, TaskKind, TaskLease, TaskPlan, WorkSpec

# The ledger's file: SQLite, in which every change of the ledger is one transaction.
#
#     ledger     one row: the version of the file, the settings of the `WorkSpec` as JSON, and the
#                `LedgerPosition`
#     parts      the parts of the data, in order
#     tasks      the open tasks, by token. One without a holder waits to be leased
#
# Only open tasks are stored, so the file stays as small as the number of trainers. The journal is SQLite's
# write-ahead log, synchronous NORMAL: what was committed survives the death of the process. If the machine
# loses power, the last commits may be lost, and the job continues from its checkpoint, which has a position
# of its own. The file is locked while it is open: a second master is refused.

VERSION = 3


class LedgerPosition(NamedTuple):
    """What has been issued of the plan, and what came of it."""

    epoch: int = 0
    issued: int = 0
    """Tasks of the epoch that have been issued at least once."""
    token: int = 0
    """The last one that was used."""
    records: int = 0
    """Records of training tasks that have been acknowledged since the job began."""
    bad_records: int = 0
    exported: int = 0
    """Whether the export task is done, and nothing was trained since: 0 or 1."""
    failure: str | None = None
    evaluation: int = 0
    """The number of the last evaluation that has begun."""
    prediction: int = 0
    """The number of the last prediction that has begun."""


class OpenTask(NamedTuple):
    """A task, its token, and its holder or None if it waits."""

    token: int
    holder: str | None
    task: Task


_TABLES = (
    f"CREATE TABLE IF NOT EXISTS ledger (version, settings, {', '.join(LedgerPosition._fields)})",
    "CREATE TABLE IF NOT EXISTS parts (path, records)",
    f"CREATE TABLE IF NOT EXISTS tasks (token INTEGER PRIMARY KEY, holder, {', '.join(Task._fields)})",
)
_COLUMNS = ", ".join(LedgerPosition._fields)
_SET_POSITION = f"UPDATE ledger SET ({_COLUMNS}) = ({', '.join('?' * len(LedgerPosition._fields))})"
_PUT = f"INSERT OR REPLACE INTO tasks VALUES ({', '.join('?' * (len(Task._fields) + 2))})"
_REMOVE = "DELETE FROM tasks WHERE token = ?"


class LedgerError(RuntimeError):
    """A ledger that cannot be used: in use by another master, damaged, or of another job."""


class LedgerDiskError(OSError):
    """The disk did not take a change of the ledger, so nothing has changed: it may be full."""


_OUTAGES = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
}


class LedgerFile:
    """The open tasks and the settings of a ledger on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)
            self._database.executescript(
                "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
            )
            with self.transaction():
                for statement in _TABLES:
                    self._database.execute(statement)
                row = self._database.execute("SELECT version FROM ledger").fetchone()
        except sqlite3.OperationalError as error:
            if (number := _outage(error)) is not None:
                raise LedgerDiskError(number, f"{path} could not be opened: {error}") from None
            if "locked" not in str(error):
                raise LedgerError(f"{path} could not be opened: {error}.") from None
            raise LedgerError(
                f"{path} is in use: another master runs this job. Stop it first, or wait until it has ended."
            ) from None
        except sqlite3.DatabaseError as error:
            raise self._damage(error) from None
        if row is not None and row[0] != VERSION:
            self.close()
            raise LedgerError(
                f"Expected version {VERSION} of the ledger {path}, got {row[0]}, of another Karvan. Finish "
                "the job with that one, or remove the file: Trainer.fit then continues from the position in "
                "its newest checkpoint, and kv.data.elastic begins anew."
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside of it are on disk, or none."""
        try:
            with self._database:  # which ends the transaction
                self._database.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.OperationalError as error:
            text = f"{self.path} could not be written, nothing was changed: {error}"
            raise LedgerDiskError(_outage(error) or errno.EIO, text) from None

    def begin(self, spec: WorkSpec) -> None:
        """Write a spec, and the position at its start, into a new file."""
        values = (VERSION, json.dumps(spec.settings()), *LedgerPosition())
        with self.transaction():
            self._database.execute(f"INSERT INTO ledger VALUES ({', '.join('?' * len(values))})", values)
            self._database.executemany("INSERT INTO parts VALUES (?, ?)", spec.parts)

    def set_spec(self, spec: WorkSpec) -> None:
        """Have other settings, and parts."""
        with self.transaction():
            self._database.execute("UPDATE ledger SET settings = ?", (json.dumps(spec.settings()),))
            self._database.execute("DELETE FROM parts")
            self._database.executemany("INSERT INTO parts VALUES (?, ?)", spec.parts)

    def read(self) -> tuple[WorkSpec, LedgerPosition, list[OpenTask]] | None:
        """The spec, the position and the open tasks, the oldest first; None if the file is new."""
        try:
            row = self._database.execute("SELECT * FROM ledger").fetchone()
            if row is None:
                return None
            _, settings, *position = row
            parts = tuple(self._database.execute("SELECT path, records FROM parts ORDER BY rowid"))
            spec = WorkSpec(**{**json.loads(settings), "parts": parts})
            rows = self._database.execute("SELECT * FROM tasks ORDER BY token")
            tasks = [OpenTask(token, holder, task_from(fields)) for token, holder, *fields in rows]
            return spec, LedgerPosition(*position), tasks
        except (sqlite3.DatabaseError, TypeError, ValueError, RecursionError) as error:
            if (number := _outage(error)) is not None:
                raise LedgerDiskError(number, f"{self.path} could not be read: {error}") from None
            raise self._damage(error) from None

    def _damage(self, error: Exception) -> LedgerError:
        return LedgerError(
            f"{self.path} is not a ledger, or it is damaged ({error}). Remove it: the job then continues "
            "from its newest checkpoint, which holds the position in the data."
        )

    def change(self, position: LedgerPosition, remove: Iterable[int], put: Iterable[OpenTask]) -> None:
        """Set the position, remove open tasks by token, and store others, in one transaction."""
        with self.transaction():
            self._database.execute(_SET_POSITION, position)
            self._database.executemany(_REMOVE, ((token,) for token in remove))
            self._database.executemany(
                _PUT, ((token, holder, *fields_of(task)) for token, holder, task in put)
            )

    def close(self) -> None:
        """Close the file; the next master can open it."""
        self._database.close()


def _outage(error: Exception) -> int | None:
    """The error number of an outage of the disk, if that is what SQLite reports."""
    return _OUTAGES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)


def fields_of(task: Task) -> list[Any]:
    """A task as plain values."""
    return [*task[:-1], ",".join(map(str, task.skipped))]


def task_from(fields: Sequence[Any]) -> Task:
    """A task from `fields_of` it."""
    kind, *others, skipped = fields
    return Task._make([TaskKind(kind), *others, tuple(map(int, filter(None, skipped.split(","))))])


_MOST_WAITING = 1 << 20  # all tasks of an evaluation or a prediction are stored at once


class NoTask(Enum):
    """Why there is no task for a holder."""

    WAIT = "wait"  # others still work on this epoch
    DONE = "done"  # all tasks of the job are done


class JobFailedError(RuntimeError):
    """A task has failed too often; the text says which one, and its last error."""

    temporary = False  # it is the data, and will be the same next time


class TaskFailure(NamedTuple):
    """What follows from the failure of a task; all zero and None if its lease had ended before."""

    tries: int = 0
    """How often the task has failed; a failure that skips a record does not count."""
    skipped: bool = False
    """Whether its bad record is skipped from now on."""
    bad_records: int = 0
    """How many the job has skipped."""
    failure: str | None = None
    """Why the job has failed, if it has."""


class Ledger:
    """The ledger of a job. It is not thread-safe: the master calls it under one lock.

    A new file needs a `spec`. A file that exists has one; a job that is started again may change how often
    and how its data is trained, and the data when all of it is trained.
    """

    def __init__(self, path: Path, spec: WorkSpec | None = None) -> None:
        self._leases: dict[int, TaskLease] = {}
        self._tokens: dict[str, list[int]] = {}  # of the leases of each holder, the oldest first
        self._waiting: dict[int, Task] = {}
        self._file = LedgerFile(path)
        try:
            self.spec, self.position = self._read(spec)  # what has been issued, and what came of it
        except BaseException:
            self._file.close()
            raise
        self._plan = self.spec.plan()

    @classmethod
    def existing(cls, path: Path) -> Ledger | None:
        """The ledger of a job that has begun; None if its master died before, or there was none."""
        if not path.exists():
            return None
        file = LedgerFile(path)
        begun = file.read() is not None
        file.close()
        return cls(path) if begun else None

    @property
    def leases(self) -> list[TaskLease]:
        """All tasks that have a holder."""
        return list(self._leases.values())

    def lease_of(self, token: int) -> TaskLease | None:
        """The lease with this token, unless it has ended."""
        return self._leases.get(token)

    def leases_of(self, holder: str) -> list[TaskLease]:
        """The tasks that a holder has, the oldest first."""
        return [self._leases[token] for token in self._tokens.get(holder, ())]

    @property
    def waiting(self) -> list[Task]:
        """All tasks that wait to be leased again, the next one first."""
        return list(self._waiting.values())

    @property
    def complete(self) -> bool:
        """Whether all tasks were issued, also that of the export if there is one, and none is open."""
        exported = not self.spec.export or bool(self.position.exported)
        return exported and not self._open() and self._next_position().issued >= len(self._plan)

    # Leasing

    def lease(
        self, holder: str, kinds: Iterable[TaskKind] = TaskKind, most: int = 1, epoch: int | None = None
    ) -> list[TaskLease] | NoTask:
        """Up to `most` tasks for a holder. Tasks that wait come before tasks that have never been issued.

        epoch: only tasks of this one; NoTask.DONE says that it is complete, whether or not others follow. Of
        prediction tasks it is the number of the prediction, and there must be one.
        """
        if self.position.failure is not None:
            raise JobFailedError(self.position.failure)
        kinds = frozenset(kinds)
        if kinds == {TaskKind.PREDICT} and epoch is not None:
            return self._lease_prediction(holder, epoch, most)
        if epoch is not None and self.position.epoch >= epoch and self._is_complete(epoch):
            return NoTask.DONE
        waiting = self._first_waiting(kinds, most)
        tasks = [self._waiting[token] for token in waiting]
        following = self._next_position()
        now = self.position
        if TaskKind.TRAIN in kinds:
            now = following
            issued = min(now.issued + most - len(tasks), len(self._plan))
            tasks += [self._plan.task(now.epoch, index) for index in range(now.issued, issued)]
            now = now._replace(issued=issued)
        if epoch is not None and now.epoch < epoch:
            return NoTask.WAIT
        if not tasks:
            if self._waiting or self._leases or following.issued < len(self._plan):
                return NoTask.WAIT
            if not self.spec.export or now.exported:
                return NoTask.DONE
            if TaskKind.EXPORT not in kinds:
                return NoTask.WAIT
            tasks = [_export(now)]
        if any(task.kind is TaskKind.TRAIN for task in tasks):
            now = now._replace(exported=0)  # what was exported is not the end any more
        return self._issue(now, tasks, holder, remove=waiting)

    def _lease_prediction(self, holder: str, number: int, most: int) -> list[TaskLease] | NoTask:
        if not self.is_predicting(number):
            return NoTask.DONE
        tokens = self._first_waiting({TaskKind.PREDICT}, most)
        if not tokens:
            return NoTask.WAIT
        return self._issue(self.position, [self._waiting[token] for token in tokens], holder, remove=tokens)

    def _first_waiting(self, kinds: Collection[TaskKind], most: int) -> list[int]:
        return list(islice((token for token, task in self._waiting.items() if task.kind in kinds), most))

    def is_predicting(self, number: int) -> bool:
        """Whether a prediction has records that are not done, and no later one has begun."""
        return number == self.position.prediction and bool(self._tokens_of(TaskKind.PREDICT))

    def _next_position(self) -> LedgerPosition:
        """The position, in the next epoch if this one is complete and there is another."""
        now = self.position
        epochs = self.spec.epochs
        last = epochs is not None and epochs > 0 and now.epoch + 1 >= epochs
        if last or not len(self._plan) or not self._is_complete(now.epoch):
            return now
        return now._replace(epoch=now.epoch + 1, issued=0)

    def _is_complete(self, epoch: int) -> bool:
        """Whether all records of an epoch that has begun are done."""
        now = self.position
        if now.epoch != epoch:
            return now.epoch > epoch
        tasks = [task for _, task in self._open() if task.kind is TaskKind.TRAIN]
        return now.issued >= len(self._plan) and not tasks

    def begin_evaluation(self, number: int, parts: Iterable[tuple[str, int]], records_per_task: int) -> None:
        """Let the tasks of an evaluation wait, once: whoever takes part in it calls this with its number."""
        if self.position.evaluation != number:
            now = self.position._replace(evaluation=number)
            self._begin(now, TaskKind.EVALUATE, number, TaskPlan(parts, records_per_task))

    def begin_prediction(self, number: int, parts: Iterable[tuple[str, int]], records_per_task: int) -> None:
        """Let the tasks of a prediction wait, once, unless a later one has begun; see `begin_evaluation`."""
        if self.position.prediction < number:
            now = self.position._replace(prediction=number)
            self._begin(now, TaskKind.PREDICT, number, TaskPlan(parts, records_per_task))

    def forget_predictions(self) -> None:
        """All predictions begin again: the job was launched again."""
        self._commit(self.position._replace(prediction=0), remove=self._tokens_of(TaskKind.PREDICT))

    def _begin(self, now: LedgerPosition, kind: TaskKind, number: int, plan: TaskPlan) -> None:
        """Let all tasks of a plan wait, in place of those of this kind."""
        if len(plan) > _MOST_WAITING:
            raise ValueError(
                f"Expected at most {_MOST_WAITING:,} tasks of an evaluation or a prediction, got "
                f"{len(plan):,}: take more records a task."
            )
        tasks = [plan.task(number, index, kind) for index in range(len(plan))]
        self._issue(now, tasks, remove=self._tokens_of(kind))

    def begin_export(self, holder: str) -> TaskLease:
        """All is trained: lease the export task, also if another holder has it."""
        now = self.position._replace(exported=0)
        over = [*self._tokens_of(TaskKind.EXPORT), *self._tokens_of(TaskKind.EVALUATE)]
        return self._issue(now, [_export(now)], holder, remove=over)[0]

    def _tokens_of(self, kind: TaskKind) -> list[int]:
        return [token for token, task in self._open() if task.kind is kind]

    def _open(self) -> list[tuple[int, Task]]:
        """All open tasks, by token."""
        return [*self._waiting.items(), *((lease.token, lease.task) for lease in self._leases.values())]

    # Reports of holders

    def acknowledge(self, done: Mapping[int, int]) -> list[int]:
        """Note how many records of each leased task are done, by token; returns the tokens of ended leases.

        One transaction for all of them. Numbers only grow, so a report may come twice, or late.
        """
        missing = [token for token in done if token not in self._leases]
        put: list[OpenTask] = []
        remove: list[int] = []
        now = self.position
        for token, count in done.items():
            lease = self._leases.get(token)
            if lease is None:
                continue
            task = lease.task
            if not 0 <= count <= task.records:
                raise ValueError(f"Expected 0 to {task.records} records of {task} to be done, got {count}.")
            if count > task.done or not task.records:
                if task.kind is TaskKind.TRAIN:
                    now = now._replace(records=now.records + count - task.done)
                elif task.kind is TaskKind.EXPORT:
                    now = now._replace(exported=1)
                task = task._replace(done=count)
                if task.left:
                    put.append(OpenTask(token, lease.holder, task))
                else:
                    remove.append(token)
        if put or remove:
            self._commit(now, remove=remove, put=put)
        return missing

    def give_back(self, tokens: Iterable[int]) -> None:
        """End leases; what is left of their tasks waits. Tokens of leases that have ended change nothing."""
        self._requeue([self._leases[token] for token in tokens if token in self._leases])

    def fail(
        self, token: int, error: str, record: int | None = None, number: int | None = None
    ) -> TaskFailure:
        """A task failed, at a record if that is known: by its place in the task's order.

        number: that record's number in its file, for the text of the job's failure.
        """
        lease = self._leases.get(token)
        if lease is None:
            return TaskFailure(failure=self.position.failure)
        task, now = lease.task, self.position
        if record is not None and not task.done <= record < task.records:
            raise ValueError(
                f"Expected a record from {task.done} to {task.records - 1} of {task}, got {record}."
            )
        skips = record is not None and now.bad_records < self.spec.skip_bad_records
        if record is not None and skips:
            task = task._replace(skipped=tuple(sorted({*task.skipped, record})))
            now = now._replace(bad_records=now.bad_records + 1)
        else:
            task = task._replace(tries=task.tries + 1)
            if task.tries >= self.spec.most_tries:
                now = now._replace(failure=_failure(task, error, number, now.bad_records))
        self._requeue([lease._replace(task=task)], now)
        return TaskFailure(task.tries, skips, now.bad_records, now.failure)

    def _requeue(self, leases: Sequence[TaskLease], now: LedgerPosition | None = None) -> None:
        """Let tasks wait, ahead of those that were never issued; each under a token that nobody has."""
        if leases:
            tasks, tokens = [lease.task for lease in leases], [lease.token for lease in leases]
            self._issue(now or self.position, tasks, remove=tokens)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The position for a checkpoint, JSON-able. Leased tasks are in it with the records that are left.

        Only training tasks are: an evaluation is made again, the export is the checkpoint itself, and a
        prediction is what it is, whatever model there will be.
        """
        tasks = [task for _, task in self._open() if task.kind is TaskKind.TRAIN]
        return {
            "spec": self.spec.settings(),
            "position": self.position._asdict(),
            "tasks": [fields_of(task) for task in tasks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return to the position of a checkpoint. All leases end; tokens are not used again."""
        self.spec.check(state["spec"], data_only=True)
        tasks = [task_from(fields) for fields in state["tasks"]]
        records = dict(self.spec.parts)
        for task in tasks:
            in_part = task.first + task.records <= records.get(task.path, -1)
            if task.kind is not TaskKind.TRAIN or not in_part or task.done > task.records:
                raise ValueError(f"it has {task} with {task.done} records done, got data without them")
        now = LedgerPosition(**{**state["position"], "failure": None, "evaluation": 0})
        self._return_to(now._replace(token=max(now.token, self.position.token)), tasks)

    def reset(self) -> None:
        """Return to the beginning: nothing is done. All leases end; tokens are not used again."""
        self._return_to(LedgerPosition(token=self.position.token), [])

    def _return_to(self, now: LedgerPosition, tasks: Sequence[Task]) -> None:
        """Have this position and these open tasks, and the prediction that there is."""
        tasks = [*tasks, *(task for _, task in self._open() if task.kind is TaskKind.PREDICT)]
        now = now._replace(prediction=self.position.prediction)
        self._issue(now, tasks, remove=[*self._waiting, *self._leases])

    # The file

    def change_settings(self, spec: WorkSpec, drops_rest: bool = False) -> None:
        """Train the same data in another way from now on, such as with more tries.

        Or other data, such as the next day's, from its start, if the earlier data is trained to its end or
        the rest of it is dropped.
        """
        is_other = self.spec != NO_WORK and spec.parts != self.spec.parts
        is_next = is_other and (drops_rest or self._is_trained())
        if self.spec != NO_WORK and not is_next:
            spec.check(self.spec.settings(), data_only=True)
        if spec != self.spec:
            self._file.set_spec(spec)
            self.spec, self._plan = spec, spec.plan()
        if is_next:
            self.reset()

    def _is_trained(self) -> bool:
        """Whether all of the data is trained as often as was said, or whole epochs if nothing was."""
        whole = self.spec.epochs is None and self.position.issued in (0, len(self._plan))
        return self.complete or (whole and not self._open())

    def close(self) -> None:
        """Close the file; the next master continues from it."""
        self._file.close()

    def _read(self, spec: WorkSpec | None) -> tuple[WorkSpec, LedgerPosition]:
        stored = self._file.read()
        if stored is None:
            if spec is None:
                raise LedgerError(f"{self._file.path} is new, so it needs a spec of the work.")
            if not any(records for _, records in spec.parts) and not spec.export and spec != NO_WORK:
                raise ValueError("The data has no records, so there is no task.")
            self._file.begin(spec)
            return spec, LedgerPosition()
        before, position, tasks = stored
        if spec is not None and spec != before:
            if before != NO_WORK:
                spec.check(before.settings(), data_only=True)
            self._file.set_spec(spec)
        for task in tasks:
            self._note(task)
        return spec or before, position

    def _issue(
        self,
        now: LedgerPosition,
        tasks: Sequence[Task],
        holder: str | None = None,
        *,
        remove: Sequence[int] = (),
    ) -> list[TaskLease]:
        """Open tasks under new tokens, in place of others: leased to a holder, or else waiting."""
        put = [OpenTask(token, holder, task) for token, task in enumerate(tasks, now.token + 1)]
        self._commit(now._replace(token=now.token + len(put)), remove=remove, put=put)
        return self.leases_of(holder)[-len(put) :] if holder is not None and put else []

    def _commit(
        self, now: LedgerPosition, *, remove: Sequence[int] = (), put: Sequence[OpenTask] = ()
    ) -> None:
        """Change the file, then memory: if the disk is full, neither changes."""
        self._file.change(now, remove, put)
        self.position = now
        for token in remove:
            self._waiting.pop(token, None)
            if (lease := self._leases.pop(token, None)) is not None:
                self._tokens[lease.holder].remove(token)
                if not self._tokens[lease.holder]:
                    del self._tokens[lease.holder]
        for task in put:
            self._note(task)

    def _note(self, entry: OpenTask) -> None:
        token, holder, task = entry
        if holder is None:
            self._waiting[token] = task
            return
        if token not in self._leases:
            self._tokens.setdefault(holder, []).append(token)
        self._leases[token] = TaskLease(token, holder, task)


def _export(now: LedgerPosition) -> Task:
    return Task(TaskKind.EXPORT, now.epoch, 0, "", 0, 0)


def _failure(task: Task, error: str, number: int | None, bad_records: int) -> str:
    what = str(task) if number is None else f"record {number} of {task.path} (epoch {task.epoch})"
    before = f" {bad_records} bad records were skipped before." if bad_records else ""
    return f"{what} failed {task.tries} time{'s' * (task.tries != 1)}.{before} The last error: {error}"
