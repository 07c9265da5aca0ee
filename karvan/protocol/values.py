"""Values that calls of several services have in common: names and numbers, tables, rules, a trainer's hello.

Bounds follow from the types of the native core: its floats have 32 bits, its steps 32 or 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan import native
from karvan.activity import MOST_WAITS
from karvan.job.environment import MODES, SYNC
from karvan.job.roles import all_roles
from karvan.wire.message import Array, RefusedError
from karvan.wire.schema import (
    FLOAT32_MAX,
    Boolean,
    Call,
    Fields,
    Float,
    Head,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Plain,
    Struct,
    Text,
    TupleOf,
    field,
    optional,
    shown,
    table_of,
)

# The calls of a job's registry, made by members and by clients that look for them.


ROLE = OneOf(*all_roles())
INDEX = Integer(0, 2**20)
GENERATION = Integer(0, 2**31)
_ADDRESS = Text(300)
_PID = Integer(0, 2**31)


class MemberFields(Head):
    """What a member sends with each of its calls; `process` is a random name."""

    role: str = field(ROLE)
    index: int = field(INDEX)
    address: str = field(_ADDRESS)
    generation: int = field(GENERATION)
    pid: int = field(_PID)
    process: str = field(Text(64))
    # How many processes the role has, if the member knows; see `Directory.count`.
    count: int = optional(INDEX, default=0)


# See `karvan.activity.ActivityReport`.
_ACTIVITY = Fields(
    {
        "progress": Integer(),
        "idle": Float(0.0),
        "task": Text(100, 0),
        "waits": MapOf(Float(0.0), MOST_WAITS, Text(100)),
        "dumps": Boolean(),
    }
)


class Beat(MemberFields):
    """A member is alive, and what it has done."""

    activity: dict[str, Any] = field(_ACTIVITY)


class BeatAnswer(Head):
    """Whether the registry knows the member, and whether another process has its place."""

    known: bool = field(Boolean())
    replaced: bool = field(Boolean())


class ListedMember(Head):
    """A member as the registry lists it; `silent` in seconds."""

    role: str = field(ROLE)
    index: int = field(INDEX)
    address: str = field(_ADDRESS)
    generation: int = field(GENERATION)
    pid: int = field(_PID)
    healthy: bool = field(Boolean())
    silent: float = field(Float(0.0))
    count: int = field(INDEX)


class Generation(Head):
    """How often the job went back to a checkpoint."""

    generation: int = field(GENERATION)


class MemberList(Head):
    """The members of a job."""

    members: list[ListedMember] = field(ListOf(Struct(ListedMember)))


REGISTER = Call("register", Struct(MemberFields))
BEAT = Call("beat", Struct(Beat), answer=Struct(BeatAnswer))
LEAVE = Call("leave", Struct(MemberFields))
GENERATION_OF_JOB = Call("generation", answer=Struct(Generation))
MEMBERS = Call("members", answer=Struct(MemberList))
REGISTRY_CALLS = table_of(REGISTER, BEAT, LEAVE, GENERATION_OF_JOB, MEMBERS)


MOST_DIM = 65536
MOST_TABLES = 4096
_MOST_STATE = max(columns * MOST_DIM + row for columns, row in native.RULES.values())  # floats of a row

NUMBER = Integer(0, 2**53)  # counts and identifiers
STEP = Integer(0, 2**32 - 1)
NOW = Float()
FLOAT32 = Float(-FLOAT32_MAX, FLOAT32_MAX)
TABLE = Text(1000)
TABLES = ListOf(TABLE, MOST_TABLES)
PATH = Text(4096)
WIRE = OneOf("float32", "bfloat16", "float16")

STATE = ListOf(FLOAT32, _MOST_STATE)
SPEC = Fields(
    {
        "name": TABLE,
        "dim": Integer(1, MOST_DIM),
        "dtype": OneOf("float32", "bfloat16", "float16"),
        "init": TupleOf(Text(40), FLOAT32, FLOAT32, FLOAT32, FLOAT32),
        "admit": TupleOf(
            OneOf("always", "probability", "probability_each", "min_count", "read_only"),
            Float(0, 2**32 - 1),
            Integer(0, 2**40),
        ),
        "evict": TupleOf(
            OneOf("never", "lru", "lfu", "age", "ttl", "norm"), Float(0, 2**53), Integer(1, 2**53)
        ),
        "seed": Integer(0, 2**64 - 1),
        "shards": Integer(1, 256),
    }
)


class DeclaredTable(Head):
    """A table, and how optimizer state starts in it."""

    spec: dict[str, Any] = field(SPEC)
    initial: list[float] | None = optional(STATE)


# The tables that a restarted server must have, by name.
DECLARED = MapOf(Struct(DeclaredTable), MOST_TABLES, TABLE)

RULE = Fields(
    {
        "kind": OneOf(*native.RULES),
        **dict.fromkeys(native.FLOATS, FLOAT32),
        "accumulate_last": Boolean(),
    }
)
RULES = MapOf(RULE, MOST_TABLES, TABLE)
STEPS = MapOf(NUMBER, MOST_TABLES, TABLE)

DENSE_SETTINGS = Fields(
    {},
    {
        "lr_staleness": Boolean(),
        "grads_to_wait": Nullable(Integer(1, 2**20)),
        "tolerance": Nullable(Integer(0, 2**31)),
        "pull_every": Integer(1, 2**31),
    },
)
RUN = Text(64)
MODEL = Integer(0, 2**31)  # one whose dense parameters are on servers
MEMBER = Integer(0, 2**20)  # a trainer; in an elastic run the master gives out each number once


class TrainerHello(Head):
    """What each trainer says of itself and its run."""

    generation: int = field(GENERATION)
    run: str = field(RUN)
    trainer: int = field(MEMBER)
    trainers: int = field(Integer(1, 2**20))


class RunHello(TrainerHello):
    """What a trainer says to those who store and look up rows."""

    trainers: int = field(Integer(0, 2**20))  # 0 in an elastic run, whose trainers come and go
    servers: int = field(Integer(1, 2**20))
    mode: str = optional(OneOf(*MODES), default=SYNC.name)
    staleness: int = optional(Integer(1, 2**20), default=1)
    grad_reduce: str = optional(OneOf("mean", "key", "sum"), default="mean")
    dense: dict[str, Any] | None = optional(DENSE_SETTINGS)
    reload: bool = optional(Boolean(), default=False)
    line: str = optional(Text(40), default="")
    elastic: bool = optional(Boolean(), default=False)


def words(keys: int) -> int:
    """How many 64-bit words this many keys and their 32-bit use counts take."""
    return keys + (keys + 1) // 2


def wire_dtype(head: Any) -> str:
    """The dtype in which floats are sent; two-byte floats are sent as uint16."""
    return "float32" if head.wire == "float32" else "uint16"


def expect_distinct(what: str, names: Sequence[Any]) -> None:
    """A RefusedError if one occurs twice."""
    if len(set(names)) != len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise RefusedError(f"expected each of {what} once, got {twice!r} twice.")


def expect_same_names(what: str, names: Mapping[str, Any], other: str, others: Mapping[str, Any]) -> None:
    """A RefusedError unless two parts of a head name the same tables."""
    if set(names) != set(others):
        odd = sorted(set(names) ^ set(others))[0]
        raise RefusedError(f"expected {what} and {other} of the same tables, got '{odd}' in one of them.")


def expect_declared_names(tables: Mapping[str, DeclaredTable]) -> None:
    """A RefusedError unless each table has the name of its spec."""
    for name, table in tables.items():
        if table.spec["name"] != name:
            raise RefusedError(
                f"expected the spec of table '{name}', got the spec of '{table.spec['name']}'."
            )


# Batches in messages: how a head describes its arrays; see `karvan/cluster/batch_messages.py`.


# The number of parts of each kind of entry; "plain" and "reference" have none.
_PARTS = {"tensor": 1, "ragged": 3, "optional": 3, "optional text": 3, "nested": 3, "padded": 2}
_REFERENCE = TupleOf(Integer(0, 2**20), Text(200), Integer(0, 2**48))

NAME = Text(1000)
BATCH = MapOf(TupleOf(OneOf(*_PARTS, "plain", "reference"), Plain()), 2**16, NAME)


def check_batch(batch: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    """A RefusedError unless every part is an array of the message, and every array is exactly one part."""
    used: list[int] = []
    for name, (kind, content) in batch.items():
        if kind == "reference":
            _REFERENCE.check(content, f"batch[{name!r}]")
        if kind not in _PARTS:
            continue
        if not isinstance(content, list) or len(content) != _PARTS[kind] or content[0] is None:
            raise RefusedError(
                f"expected the {_PARTS[kind]} parts of a {kind}, '{name}', got {shown(content)}."
            )
        for part in content:
            if part is not None:
                used.append(_array_number(name, part, arrays))
    if sorted(used) != list(range(len(arrays))):
        raise RefusedError(f"expected a batch with each of {len(arrays)} arrays once, got {used[:20]}.")


def _array_number(name: str, part: Any, arrays: Sequence[Array]) -> int:
    match part:
        case [int(number), str(bits)] if type(number) is int and bits in ("", "bfloat16"):
            if not 0 <= number < len(arrays):
                raise RefusedError(f"expected one of {len(arrays)} arrays for '{name}', got number {number}.")
            if bits and arrays[number].dtype.name != "uint16":
                raise RefusedError(f"expected '{name}' as uint16, got {arrays[number].dtype.name}.")
            return number
    raise RefusedError(f"expected the number of an array and its bits for '{name}', got {shown(part)}.")
