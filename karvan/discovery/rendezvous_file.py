"""The file of a rendezvous store: SQLite, so that keys survive the death of the process.

Nothing is synced to the disk: if the machine dies, so do the trainers whose keys these are. If the file is on
a network file system, and was damaged by that, it begins again. A change that a full disk does not take is in
memory only, with a warning: if the process dies then, trainers connect again.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

_log = logging.getLogger(__name__)

_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS generation (number);
CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, request TEXT, answer BLOB);
"""


class RendezvousFile:
    """Keys and answers of one generation."""

    def __init__(self, path: Path) -> None:
        try:
            self._database = _open(path)
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # another process has it open
                raise
            _log.warning("%s is damaged (%s), so trainers that are connecting do so again.", path, error)
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                path.with_name(name).unlink(missing_ok=True)
            self._database = _open(path)

    def read(self) -> tuple[int, dict[str, bytes], dict[str, bytes]]:
        """The generation, its keys, and the answers to requests, the oldest first."""
        row = self._database.execute("SELECT number FROM generation").fetchone()
        keys = dict(self._database.execute("SELECT key, value FROM keys"))
        answers = dict(self._database.execute("SELECT request, answer FROM answers ORDER BY number"))
        return (0 if row is None else row[0]), keys, answers

    def begin(self, generation: int) -> None:
        """Drop everything, for this generation."""
        self._database.executescript(
            "BEGIN; DELETE FROM generation; DELETE FROM keys; DELETE FROM answers; "
            f"INSERT INTO generation VALUES ({generation:d}); COMMIT"
        )

    def change(
        self,
        put: Mapping[str, bytes],
        remove: Iterable[str] = (),
        answer: tuple[str, bytes] | None = None,
        forget: Iterable[str] = (),
    ) -> None:
        """Set and remove keys, and store the answer to a request, in one transaction."""
        database = self._database
        database.execute("BEGIN")
        try:
            database.executemany("INSERT OR REPLACE INTO keys VALUES (?, ?)", put.items())
            database.executemany("DELETE FROM keys WHERE key = ?", ((key,) for key in remove))
            if answer is not None:
                database.execute("INSERT INTO answers (request, answer) VALUES (?, ?)", answer)
            database.executemany("DELETE FROM answers WHERE request = ?", ((each,) for each in forget))
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            _log.warning("Rendezvous keys could not be saved, in case the registry dies: %s", error)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


class NoRendezvousFile:
    """Keys that are held in memory only."""

    def read(self) -> tuple[int, dict[str, bytes], dict[str, bytes]]:
        """Nothing."""
        return 0, {}, {}

    def begin(self, generation: int) -> None:
        """Nothing to drop."""

    def change(
        self,
        put: Mapping[str, bytes],
        remove: Iterable[str] = (),
        answer: tuple[str, bytes] | None = None,
        forget: Iterable[str] = (),
    ) -> None:
        """Nothing to store."""

    def close(self) -> None:
        """Nothing to close."""


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        database.executescript(_TABLES)
    except sqlite3.Error:
        database.close()
        raise
    return database
