"""The rendezvous of ranks: a store of keys for torch.distributed, its file and its calls."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from karvan.protocol import master as protocol
from karvan.protocol.values import Generation
from karvan.wire import Endpoint, Message, RefusedError, Request

# The file of a rendezvous store: SQLite, so that keys survive the death of the process.
#
# Nothing is synced to the disk: if the machine dies, so do the trainers whose keys these are. If the file is
# on a network file system, and was damaged by that, it begins again. A change that a full disk does not take
# is in memory only, with a warning: if the process dies then, trainers connect again.


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
            database.executemany("DELETE FROM answers WHERE request = ?", ((number,) for number in forget))
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


# The key-value store inside the registry for the rendezvous of trainers.
#
# torch's process groups need a store in which ranks find each other's addresses. torch's own (`TCPStore`)
# listens on every interface and requires no token. This one is part of the registry, so it is protected by
# the job's token and TLS, and needs no separate port. `karvan.distributed.wire_store` is the other side.
#
# Every call names the generation of its trainer. The store holds the keys of one generation only: the
# launcher starts the next one when it restarts trainers, which drops all keys, and calls of an earlier
# generation are refused. The keys of a trainer that dies remain until then. No call waits for a key: a
# caller that needs a missing key asks again, so that it does not hold a thread of the registry.
#
# With a file, the keys survive a restart of the registry. A trainer whose call was not answered by then
# calls again. `set` and `get` may be repeated; the other changes name their request, whose answer is stored
# with the change, and repeated.
#
# The number and size of keys and values are bounded, so that a faulty trainer fails by itself and does not
# fill the registry's memory. A call that would exceed a bound is refused and changes nothing.


_INT64 = range(-(2**63), 2**63)
_MOST_ANSWERS = 4096  # that may be repeated
_OVERHEAD = 128  # bytes of a key in addition to its text and its value


@dataclass(frozen=True)
class StoreBounds:
    """How much a store may hold; `key_length` and sizes are bytes."""

    keys: int = protocol.MOST_KEYS
    key_length: int = 4 * protocol.LONGEST_KEY
    value_size: int = 1 << 20
    total_size: int = 1 << 26


class RendezvousStore:
    """The keys of one generation, in a file if there is a path; its methods may be called from any thread.

    request: a random name of a call; a call with the name of an earlier one changes nothing, and returns the
    same. An empty one is never the same.
    """

    def __init__(self, bounds: StoreBounds | None = None, path: Path | None = None) -> None:
        self.bounds = bounds or StoreBounds()
        self._lock = threading.Lock()
        self._file = NoRendezvousFile() if path is None else RendezvousFile(path)
        self._generation, self._values, self._answers = self._file.read()
        self._size = sum(_size(*item) for item in self._values.items())

    @property
    def generation(self) -> int:
        """The one whose keys it holds."""
        return self._generation

    def begin_generation(self, generation: int) -> None:
        """Drop the keys of earlier generations; from now on only this one is served."""
        with self._lock:
            self._file.begin(generation)
            self._generation = generation
            self._values, self._answers = {}, {}
            self._size = 0

    def close(self) -> None:
        """Close the file, if there is one."""
        with self._lock:
            self._file.close()

    def set(self, generation: int, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set all of these keys, or none of them."""
        with self._lock:
            self._check(generation)
            self._put(dict(zip(keys, values, strict=True)))

    def get(self, generation: int, keys: Sequence[str]) -> list[bytes] | None:
        """The values of these keys; None unless all of them exist."""
        with self._lock:
            self._check(generation)
            if not all(key in self._values for key in keys):
                return None
            return [self._values[key] for key in keys]

    def has(self, generation: int, keys: Sequence[str]) -> bool:
        """Whether all of these keys exist."""
        with self._lock:
            self._check(generation)
            return all(key in self._values for key in keys)

    def add(self, generation: int, key: str, amount: int, request: str = "") -> int:
        """Add to a number, which is 0 if the key does not exist; returns the sum."""
        with self._lock:
            self._check(generation)
            if (answer := self._answers.get(request)) is not None:
                return int(answer)
            before = self._values.get(key, b"0")
            try:
                total = int(before) + amount
            except ValueError:
                raise ValueError(f"add expects a number at {key[:100]!r}, got {before[:20]!r}.") from None
            if total not in _INT64:
                raise ValueError(f"add expects a sum of 64 bits at {key[:100]!r}, got {total}.")
            self._put({key: str(total).encode()}, request, str(total).encode())
            return total

    def append(self, generation: int, key: str, value: bytes, request: str = "") -> None:
        """Append to a value, which is empty if the key does not exist."""
        with self._lock:
            self._check(generation)
            if request not in self._answers:
                self._put({key: self._values.get(key, b"") + value}, request)

    def compare_set(
        self, generation: int, key: str, expected: bytes, desired: bytes, request: str = ""
    ) -> bytes:
        """Set a key if it has the expected value, or is missing and the expected value is empty.

        Returns the value afterwards; for a missing key the expected one, as torch's stores do.
        """
        with self._lock:
            self._check(generation)
            if (answer := self._answers.get(request)) is not None:
                return answer
            current = self._values.get(key)
            if current == expected or (current is None and not expected):
                self._put({key: desired}, request, desired)
                return desired
            return expected if current is None else current

    def delete(self, generation: int, key: str, request: str = "") -> bool:
        """Remove a key; returns whether it existed."""
        with self._lock:
            self._check(generation)
            if request in self._answers:
                return True
            if key not in self._values:
                return False
            self._store({}, request, b"", remove=[key])
            self._size -= _size(key, self._values.pop(key))
            return True

    def count(self, generation: int) -> int:
        """The number of keys."""
        with self._lock:
            self._check(generation)
            return len(self._values)

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise RefusedError(
                f"Trainers expected to be of generation {self._generation}, got {generation}: "
                "the job has continued without this one."
            )

    def _put(self, values: dict[str, bytes], request: str = "", answer: bytes = b"") -> None:
        bounds, size, count = self.bounds, self._size, len(self._values)
        for key, value in values.items():
            length = len(key.encode())
            if length > bounds.key_length or len(value) > bounds.value_size:
                raise RefusedError(
                    f"The rendezvous store expects keys of up to {bounds.key_length} bytes and values of up "
                    f"to {bounds.value_size}, got {length} and {len(value)} at {key[:100]!r}."
                )
            before = self._values.get(key)
            count += before is None
            size += _size(key, value) - (0 if before is None else _size(key, before))
        if count > bounds.keys or size > bounds.total_size:
            raise RefusedError(
                f"The rendezvous store expects up to {bounds.keys} keys and {bounds.total_size} bytes, "
                f"got {count} and {size}."
            )
        self._store(values, request, answer)
        self._values.update(values)
        self._size = size

    def _store(
        self, values: Mapping[str, bytes], request: str, answer: bytes, remove: Sequence[str] = ()
    ) -> None:
        """Change the file, and note the answer to a request."""
        old = [next(iter(self._answers))] if request and len(self._answers) >= _MOST_ANSWERS else []
        self._file.change(values, remove, (request, answer) if request else None, old)
        if request:
            self._answers[request] = answer
        for key in old:
            del self._answers[key]


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + _OVERHEAD


# The registry's calls on its `RendezvousStore`; see `karvan.protocol.master`.


def rendezvous_endpoints(store: RendezvousStore) -> list[Endpoint[Any]]:
    """An endpoint for each of RENDEZVOUS_CALLS."""

    def set_values(request: Request[protocol.SetKeys]) -> Message:
        head = request.head
        store.set(head.generation, head.keys, protocol.unpack_values(head.sizes, request.arrays))
        return Message({})

    def get(request: Request[protocol.Keys]) -> Message[protocol.PresentValues]:
        values = store.get(request.head.generation, request.head.keys)
        sizes, arrays = protocol.pack_values(values or [])
        return Message(protocol.PresentValues(present=values is not None, sizes=sizes), arrays)

    def check(request: Request[protocol.Keys]) -> Message[protocol.Presence]:
        return Message(protocol.Presence(present=store.has(request.head.generation, request.head.keys)))

    def add(request: Request[protocol.AddToKey]) -> Message[protocol.Total]:
        head = request.head
        return Message(protocol.Total(total=store.add(head.generation, head.key, head.amount, head.request)))

    def append(request: Request[protocol.AppendToKey]) -> Message:
        head = request.head
        [value] = protocol.unpack_values(head.sizes, request.arrays)
        store.append(head.generation, head.key, value, head.request)
        return Message({})

    def compare_set(request: Request[protocol.CompareSetKey]) -> Message[protocol.OneValue]:
        head = request.head
        expected, desired = protocol.unpack_values(head.sizes, request.arrays)
        value = store.compare_set(head.generation, head.key, expected, desired, head.request)
        sizes, arrays = protocol.pack_values([value])
        return Message(protocol.OneValue(sizes=sizes), arrays)

    def delete(request: Request[protocol.ChangeKey]) -> Message[protocol.Deleted]:
        head = request.head
        return Message(protocol.Deleted(deleted=store.delete(head.generation, head.key, head.request)))

    def count(request: Request[Generation]) -> Message[protocol.KeyCount]:
        return Message(protocol.KeyCount(keys=store.count(request.head.generation)))

    return [
        Endpoint(protocol.STORE_SET, set_values),
        Endpoint(protocol.STORE_GET, get),
        Endpoint(protocol.STORE_CHECK, check),
        Endpoint(protocol.STORE_ADD, add),
        Endpoint(protocol.STORE_APPEND, append),
        Endpoint(protocol.STORE_COMPARE_SET, compare_set),
        Endpoint(protocol.STORE_DELETE, delete),
        Endpoint(protocol.STORE_COUNT, count),
    ]
