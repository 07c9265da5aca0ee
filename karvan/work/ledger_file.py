"""The ledger's file: SQLite, in which every change of the ledger is one transaction.

    ledger     one row: the version of the file, the settings of the `WorkSpec` as JSON, the `LedgerPosition`
    parts      the parts of the data, in order
    tasks      the open tasks, by token. One without a holder waits to be leased

Only open tasks are stored, so the file stays as small as the number of trainers. The journal is SQLite's
write-ahead log, synchronous NORMAL: what was committed survives the death of the process. If the machine
loses power, the last commits may be lost, and the job continues from its checkpoint, which has a position of
its own. The file is locked while it is open: a second master is refused.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from karvan.work.task import Task, TaskKind, WorkSpec

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
            self._database.execute("BEGIN IMMEDIATE")
            yield
            self._database.execute("COMMIT")
        except BaseException as error:
            if self._database.in_transaction:  # SQLite itself undoes one that found the disk full
                self._database.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                number = _outage(error) or errno.EIO
                text = f"{self.path} could not be written, nothing was changed: {error}"
                raise LedgerDiskError(number, text) from None
            raise

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
            spec = WorkSpec.from_settings(json.loads(settings), parts)
            return spec, LedgerPosition(*position), list(self._tasks())
        except (sqlite3.DatabaseError, TypeError, ValueError, RecursionError) as error:
            if (number := _outage(error)) is not None:
                raise LedgerDiskError(number, f"{self.path} could not be read: {error}") from None
            raise self._damage(error) from None

    def _damage(self, error: Exception) -> LedgerError:
        return LedgerError(
            f"{self.path} is not a ledger, or it is damaged ({error}). Remove it: the job then continues "
            "from its newest checkpoint, which holds the position in the data."
        )

    def _tasks(self) -> Iterator[OpenTask]:
        for token, holder, *fields in self._database.execute("SELECT * FROM tasks ORDER BY token"):
            yield OpenTask(token, holder, task_from(fields))

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
