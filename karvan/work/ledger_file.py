"""The ledger's file: SQLite, in which every change of the ledger is one transaction.

    settings   key, value as JSON: what the job reads, its position, how it ended
    tasks      token, holder, task: those that are open. No holder: the task waits to be leased

Only open tasks are stored, so the file stays as small as the number of trainers. The journal is SQLite's
write-ahead log, synchronous NORMAL: what was committed survives the death of the process; what was committed
last may be lost if the machine loses power, and the job then continues from its checkpoint, which holds a
position of its own. The file is locked while it is open: a second master is refused.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from karvan.work.task import Task, TaskKind

VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tasks (token INTEGER PRIMARY KEY, holder TEXT, task TEXT NOT NULL);
"""


class LedgerError(RuntimeError):
    """A ledger that cannot be used: in use by another master, damaged, or of another job."""


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
                for statement in filter(None, map(str.strip, _TABLES.split(";"))):
                    self._database.execute(statement)
                version = self.settings().get("version", VERSION)
                self.set("version", version)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise LedgerError(f"{path} could not be opened: {error}.") from None
            raise LedgerError(
                f"{path} is in use: another master runs this job. Stop it first, or wait until it has ended."
            ) from None
        except sqlite3.DatabaseError as error:
            raise LedgerError(
                f"{path} is not a ledger, or it is damaged ({error}). Remove it: the job then continues from "
                "its newest checkpoint, which holds the position in the data."
            ) from None
        if version != VERSION:
            self.close()
            raise LedgerError(f"Expected version {VERSION} of the ledger {path}, got {version}.")

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
                raise LedgerError(
                    f"{self.path} could not be written, nothing was changed: {error}."
                ) from None
            raise

    def settings(self) -> dict[str, Any]:
        """All settings."""
        rows = self._database.execute("SELECT key, value FROM settings")
        return {key: json.loads(value) for key, value in rows}

    def set(self, key: str, value: Any) -> None:
        """Set one setting."""
        self._database.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (key, json.dumps(value)))

    def tasks(self) -> Iterator[tuple[int, str | None, Task]]:
        """All open tasks, the oldest first: token, holder, task."""
        for token, holder, text in self._database.execute("SELECT * FROM tasks ORDER BY token"):
            yield token, holder, task_from(json.loads(text))

    def put(self, token: int, holder: str | None, task: Task) -> None:
        """Store an open task, in place of the one with the same token."""
        text = json.dumps(asdict(task), separators=(",", ":"))
        self._database.execute("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?)", (token, holder, text))

    def remove(self, tokens: Iterable[int]) -> None:
        """Remove tasks that are done, or open under another token."""
        self._database.executemany("DELETE FROM tasks WHERE token = ?", ((token,) for token in tokens))

    def close(self) -> None:
        """Close the file; the next master can open it."""
        self._database.close()


def task_from(fields: Mapping[str, Any]) -> Task:
    """A task from its fields, as `dataclasses.asdict` and JSON give them."""
    return Task(**{**fields, "kind": TaskKind(fields["kind"]), "skipped": tuple(fields["skipped"])})
