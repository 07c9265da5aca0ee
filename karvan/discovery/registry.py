"""The registry of a job: its processes, their addresses and heartbeats.

A role's process has a `Membership` (`karvan.discovery.directory`). It registers (role, index, address,
generation) and then sends a heartbeat every second; a registry that does not know it, because the registry
has been restarted, asks it to register again. The registry never calls members: one that dies stops sending,
and counts as lost some seconds later. One that leaves says so and is removed. A heartbeat also carries what
the process is doing (`karvan.activity`), so that the launcher finds processes that run but make no progress.

A process that registers with the role and index of another replaces it; the other learns that from its next
heartbeat and sends no more. A process of an older generation of the job cannot replace one of a newer.

The number of members is bounded: a role has as many as the job's replicas, and every part of a registration
has a limit, so that the list of members stays small.

The registry also holds the generation of the job. Only its own process can change it (`begin_generation`, by
the launcher); members and services ask for it, and a member of a generation that has not started is refused.

It also serves the rendezvous of the job's trainers: a store of keys for torch.distributed.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from karvan.activity import ActivityReport
from karvan.clock import clock
from karvan.job.address import reachable
from karvan.job.roles import Role, all_roles, role_of
from karvan.protocol import master
from karvan.protocol import values as protocol
from karvan.protocol.master import RENDEZVOUS_CALLS
from karvan.protocol.values import Generation, Member
from karvan.wire import Endpoint, Message, RefusedError, Request, Security, Server, Service, endpoints
from karvan.wire.schema import Call

G = TypeVar("G", bound=Generation)

# The file of a rendezvous store: SQLite, so that keys survive the death of the process.
#
# Nothing is synced to the disk: if the machine dies, so do the trainers whose keys these are. If the file is
# on a network file system, and was damaged by that, it begins again. A change that a full disk does not take
# is in memory only, with a warning: if the process dies then, trainers connect again.


_TABLES = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS generation (number);
CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, request TEXT, answer BLOB);
"""


class RendezvousFile:
    """Keys and answers of one generation; without a path they are in memory only."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._database = _open(path or ":memory:")
        except sqlite3.DatabaseError as error:
            if path is None or type(error) is not sqlite3.DatabaseError:  # another process has it open
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
        try:
            with self._database as database:  # which ends the transaction
                database.execute("BEGIN")
                database.executemany("INSERT OR REPLACE INTO keys VALUES (?, ?)", put.items())
                database.executemany("DELETE FROM keys WHERE key = ?", ((key,) for key in remove))
                if answer is not None:
                    database.execute("INSERT INTO answers (request, answer) VALUES (?, ?)", answer)
                database.executemany("DELETE FROM answers WHERE request = ?", ((name,) for name in forget))
        except sqlite3.OperationalError as error:
            _log.warning("Rendezvous keys could not be saved, in case the registry dies: %s", error)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _open(path: Path | str) -> sqlite3.Connection:
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

    keys: int = master.MOST_KEYS
    key_length: int = 4 * master.LONGEST_KEY
    value_size: int = 1 << 20
    total_size: int = 1 << 26


class RendezvousStore:
    """The keys of one `generation`, in a file if there is a path, and the endpoints of the calls about them.

    A call whose `request` is that of an earlier one changes nothing, and has the same answer. An empty one is
    never the same.
    """

    def __init__(self, bounds: StoreBounds | None = None, path: Path | None = None) -> None:
        self.bounds = bounds or StoreBounds()
        self._lock = threading.Lock()
        self._file = RendezvousFile(path)
        self.generation, self._values, self._answers = self._file.read()
        self._size = sum(_size(*item) for item in self._values.items())
        self.endpoints: list[Endpoint[Any]] = [
            self._endpoint(master.STORE_SET, self._set),
            self._endpoint(master.STORE_GET, self._get),
            self._endpoint(
                master.STORE_CHECK,
                lambda head, _: Message({"present": all(key in self._values for key in head.keys)}),
            ),
            self._endpoint(master.STORE_ADD, self._add),
            self._endpoint(master.STORE_APPEND, self._append),
            self._endpoint(master.STORE_COMPARE_SET, self._compare_set),
            self._endpoint(master.STORE_DELETE, self._delete),
            self._endpoint(master.STORE_COUNT, lambda head, _: Message({"keys": len(self._values)})),
        ]

    def begin_generation(self, generation: int) -> None:
        """Drop the keys of earlier generations; from now on only this one is served."""
        with self._lock:
            self._file.begin(generation)
            self.generation = generation
            self._values, self._answers = {}, {}
            self._size = 0

    def close(self) -> None:
        """Close the file, if there is one."""
        with self._lock:
            self._file.close()

    def _endpoint(
        self, call: Call[G, Any], work: Callable[[G, list[bytes]], Message[Any] | None]
    ) -> Endpoint[Any]:
        """The endpoint of a call: `work` gets its head and values, while no other call changes anything."""

        def execute(request: Request[G]) -> Message[Any] | None:
            head: Any = request.head
            values = master.unpack_values(head.sizes, request.arrays) if request.arrays else []
            with self._lock:
                if head.generation != self.generation:
                    raise RefusedError(
                        f"Trainers expected to be of generation {self.generation}, got {head.generation}: "
                        "the job has continued without this one."
                    )
                return work(head, values)

        return Endpoint(call, execute)

    def _set(self, head: master.SetKeys, values: list[bytes]) -> None:
        """Set all of these keys, or none of them."""
        self._put(dict(zip(head.keys, values, strict=True)))

    def _get(self, head: master.Keys, values: list[bytes]) -> Message[master.PresentValues]:
        """The values of these keys, if all of them exist."""
        present = all(key in self._values for key in head.keys)
        sizes, arrays = master.pack_values([self._values[key] for key in head.keys] if present else [])
        return Message(master.PresentValues(present=present, sizes=sizes), arrays)

    def _add(self, head: master.AddToKey, values: list[bytes]) -> Message[master.Total]:
        """Add to a number, which is 0 if the key does not exist; the answer is the sum."""
        key, answer = head.key, self._answers.get(head.request)
        if answer is None:
            before = self._values.get(key, b"0")
            try:
                total = int(before) + head.amount
            except ValueError:
                raise ValueError(f"add expects a number at {key[:100]!r}, got {before[:20]!r}.") from None
            if total not in _INT64:
                raise ValueError(f"add expects a sum of 64 bits at {key[:100]!r}, got {total}.")
            answer = str(total).encode()
            self._put({key: answer}, head.request, answer)
        return Message(master.Total(total=int(answer)))

    def _append(self, head: master.AppendToKey, values: list[bytes]) -> None:
        """Append to a value, which is empty if the key does not exist."""
        if head.request not in self._answers:
            self._put({head.key: self._values.get(head.key, b"") + values[0]}, head.request)

    def _compare_set(self, head: master.CompareSetKey, values: list[bytes]) -> Message[master.OneValue]:
        """Set a key if it has the expected value, or is missing and the expected value is empty.

        The answer is the value afterwards; for a missing key the expected one, as torch's stores do.
        """
        (expected, desired), answer = values, self._answers.get(head.request)
        if answer is None:
            answer = self._values.get(head.key, expected)
            if self._values.get(head.key, b"") == expected:
                self._put({head.key: desired}, head.request, desired)
                answer = desired
        sizes, arrays = master.pack_values([answer])
        return Message(master.OneValue(sizes=sizes), arrays)

    def _delete(self, head: master.ChangeKey, values: list[bytes]) -> Message[master.Deleted]:
        """Remove a key; the answer is whether it existed."""
        key, deleted = head.key, head.request in self._answers or head.key in self._values
        if deleted and head.request not in self._answers:
            self._store({}, head.request, b"", remove=[key])
            self._size -= _size(key, self._values.pop(key))
        return Message(master.Deleted(deleted=deleted))

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


_log = logging.getLogger("karvan.cluster")

_MOST_REPLICAS = 1024  # of a role, if the number of the job's replicas is not known


@dataclass
class _Entry:
    head: protocol.MemberFields  # of its registration
    seen: float
    activity: ActivityReport | None = None  # of the last heartbeat


class Registry(Service):
    """The registry, at a port of this machine, until `close`.

    replicas: how many processes each role of the job has; without it, up to 1,024 of each role may register.
    lost_after: seconds without a heartbeat after which a member counts as lost, times its role's patience.
    beside: services whose calls are answered at the same address. generation: of a job that continues.
    rendezvous: a file for the keys of trainers, which then survive a restart of the registry.
    """

    name = "registry"
    progresses = False  # the process that runs it has other work

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        security: Security | None = None,
        *,
        replicas: Mapping[Role, int] | None = None,
        lost_after: float = 10.0,
        beside: Sequence[Service] = (),
        generation: int = 0,
        rendezvous: Path | None = None,
    ) -> None:
        self._replicas = dict.fromkeys(all_roles(), _MOST_REPLICAS) if replicas is None else dict(replicas)
        self._generation = generation
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._entries: dict[tuple[Role, int], _Entry] = {}
        self._store = RendezvousStore(path=rendezvous)
        if self._store.generation != generation:
            self._store.begin_generation(generation)
        self.endpoints = endpoints(
            {**protocol.REGISTRY_CALLS, **RENDEZVOUS_CALLS},
            Endpoint(protocol.REGISTER, self._register),
            Endpoint(protocol.BEAT, self._beat),
            Endpoint(protocol.LEAVE, self._leave),
            Endpoint(protocol.MEMBERS, lambda request: Message({"members": self.members()})),
            Endpoint(
                protocol.GENERATION_OF_JOB,
                lambda request: Message(protocol.Generation(generation=self._generation)),
            ),
            *self._store.endpoints,
        )
        for service in beside:
            if same := set(self.endpoints).intersection(service.endpoints):
                raise ValueError(f"{service.name} has calls of the registry: {', '.join(sorted(same))}.")
            self.endpoints = {**self.endpoints, **service.endpoints}
        self._server = Server(self, host, port, security)

    @property
    def address(self) -> str:
        """The address for other machines."""
        return reachable(self._server.address)

    def close(self) -> None:
        """Accept no more calls."""
        self._server.close()
        self._store.close()

    def healthy(self, role: Role, index: int) -> bool | None:
        """Whether its last heartbeat is recent; None: it has not registered, or has left."""
        with self._lock:
            entry = self._entries.get((role, index))
            return None if entry is None else self._member(role, index, entry).healthy

    def members(self) -> list[Member]:
        """All that have registered and not left."""
        with self._lock:
            return [self._member(*key, entry) for key, entry in sorted(self._entries.items())]

    def activities(self) -> dict[tuple[Role, int], ActivityReport]:
        """The activity in each member's last heartbeat, by role and index."""
        with self._lock:
            return {key: entry.activity for key, entry in self._entries.items() if entry.activity is not None}

    def forget(self, role: Role, index: int) -> None:
        """Remove a process that has ended; another one will replace it."""
        with self._lock:
            self._entries.pop((role, index), None)

    def begin_generation(self, generation: int) -> None:
        """Start this generation of the job: called in the registry's process, before its trainers start.

        The rendezvous keys of earlier generations are dropped.
        """
        with self._lock:
            if generation < self._generation:
                raise ValueError(f"Expected generation {self._generation} or a later one, got {generation}.")
            self._generation = generation
        self._store.begin_generation(generation)

    def _register(self, request: Request[protocol.MemberFields]) -> Message:
        head, key = request.head, _key(request.head)
        generation = head.generation
        self._check_bounds(key, head.address)
        with self._lock:
            if generation > self._generation:
                raise RefusedError(
                    f"{key[0]} {key[1]} expected to be of generation {self._generation} or an older one, "
                    f"got {generation}: the launcher has not started it."
                )
            before = self._entries.get(key)
            if before is not None and generation < before.head.generation:
                raise RefusedError(
                    f"{key[0]} {key[1]} expected to be of generation {before.head.generation}, got "
                    f"{generation}: the job has continued without it."
                )
            self._entries[key] = _Entry(head, clock.now())
        if before is None or before.head.process != head.process:
            _log.info("%s %d is at %s", *key, head.address)
        return Message({})

    def _check_bounds(self, key: tuple[Role, int], address: str) -> None:
        role, index = key
        count = self._replicas.get(role, 0)
        if index >= count:
            expected = f"{role} from 0 to {count - 1}" if count else f"no {role}"
            raise RefusedError(f"expected {expected}, got {index}: the job has no more replicas.")
        if not address.isprintable() or " " in address:
            raise RefusedError(f"expected an address without spaces, got {address!r}.")

    def _beat(self, request: Request[protocol.Beat]) -> Message[protocol.BeatAnswer]:
        with self._lock:
            entry = self._entries.get(_key(request.head))
            is_current = entry is not None and entry.head.process == request.head.process
            if entry is not None and is_current:
                entry.seen = clock.now()
                entry.activity = ActivityReport(**request.head.activity)
            return Message(protocol.BeatAnswer(known=is_current, replaced=bool(entry and not is_current)))

    def _leave(self, request: Request[protocol.MemberFields]) -> Message:
        key = _key(request.head)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.head.process == request.head.process:
                del self._entries[key]
        return Message({})

    def _member(self, role: Role, index: int, entry: _Entry) -> Member:
        silent, head = clock.silence(entry.seen), entry.head
        healthy = silent <= self._lost_after * role.patience
        return Member(
            role=role,
            index=index,
            address=head.address,
            generation=head.generation,
            pid=head.pid,
            healthy=healthy,
            silent=round(silent, 3),
            count=head.count,
        )


def _key(head: protocol.MemberFields) -> tuple[Role, int]:
    return role_of(head.role), head.index
