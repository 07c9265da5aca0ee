"""Values that calls of several services have in common: names and numbers, tables, rules, a trainer's hello.

Bounds follow from the types of the native core: its floats have 32 bits, its steps 32 or 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from karvan import native
from karvan.activity import MOST_WAITS
from karvan.errors import RefusedError
from karvan.job.environment import MODES, SYNC
from karvan.job.roles import all_roles
from karvan.wire.message import Array
from karvan.wire.schema import (
    FLOAT32_MAX,
    Call,
    Fields,
    Float,
    Head,
    Integer,
    Length,
    MapOf,
    Nullable,
    OneOf,
    Text,
    TupleOf,
    shown,
    table_of,
)

# The calls of a job's registry, made by members and by clients that look for them.


RoleName = Annotated[str, OneOf(*all_roles())]
Index = Annotated[int, Integer(0, 2**20)]
GENERATION = Integer(0, 2**31)
GenerationNumber = Annotated[int, GENERATION]
ProcessNumber = Annotated[int, Integer(0, 2**31)]
Seconds = Annotated[float, Float(0.0)]
_Address = Annotated[str, Text(300)]


class MemberFields(Head):
    """What a member sends with each of its calls; `process` is a random name."""

    role: RoleName
    index: Index
    address: _Address
    generation: GenerationNumber
    pid: ProcessNumber
    process: Annotated[str, Text(64)]
    # How many processes the role has, if the member knows; see `Directory.count`.
    count: Index = 0


# See `karvan.activity.ActivityReport`.
_ACTIVITY = Fields(
    {
        "progress": int,
        "idle": Seconds,
        "task": Text(100, 0),
        "waits": MapOf(Seconds, MOST_WAITS, Text(100)),
        "dumps": bool,
    }
)


class Beat(MemberFields):
    """A member is alive, and what it has done."""

    activity: Annotated[dict[str, Any], _ACTIVITY]


class BeatAnswer(Head):
    """Whether the registry knows the member, and whether another process has its place."""

    known: bool
    replaced: bool


class Member(Head):
    """A process of the job, as registered."""

    role: RoleName
    index: Index
    address: _Address
    generation: GenerationNumber
    pid: ProcessNumber
    healthy: bool
    silent: Seconds  # since its last heartbeat
    count: Index  # of the processes of its role, as it says; 0 if it does not

    def __str__(self) -> str:
        state = "" if self.healthy else f", no heartbeat for {self.silent:.0f} s"
        return f"{self.role} {self.index} at {self.address}{state}"


class Generation(Head):
    """How often the job went back to a checkpoint."""

    generation: GenerationNumber


class MemberList(Head):
    """The members of a job."""

    members: list[Member]


REGISTER = Call("register", MemberFields)
BEAT = Call("beat", Beat, answer=BeatAnswer)
LEAVE = Call("leave", MemberFields)
GENERATION_OF_JOB = Call("generation", answer=Generation)
MEMBERS = Call("members", answer=MemberList)
REGISTRY_CALLS = table_of(REGISTER, BEAT, LEAVE, GENERATION_OF_JOB, MEMBERS)


MOST_DIM = 65536
MOST_TABLES = 4096
_MOST_STATE = max(columns * MOST_DIM + row for columns, row in native.RULES.values())  # floats of a row

NUMBER = Integer()
Step = Annotated[int, Integer(0, 2**32 - 1)]
Float32 = Annotated[float, Float(-FLOAT32_MAX, FLOAT32_MAX)]
TableName = Annotated[str, Text(1000)]
TableNames = Annotated[list[TableName], Length(MOST_TABLES)]
FilePath = Annotated[str, Text(4096)]
FloatType = Annotated[str, OneOf("float32", "bfloat16", "float16")]

RowState = Annotated[list[Float32], Length(_MOST_STATE)]
_SPEC = Fields(
    {
        "name": TableName,
        "dim": Integer(1, MOST_DIM),
        "dtype": FloatType,
        "init": TupleOf(Text(40), Float32, Float32, Float32, Float32),
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
TableSpec = Annotated[dict[str, Any], _SPEC]


class DeclaredTable(Head):
    """A table, and how optimizer state starts in it."""

    spec: TableSpec
    initial: RowState | None = None


# The tables that a restarted server must have, by name.
DeclaredTables = Annotated[dict[TableName, DeclaredTable], Length(MOST_TABLES)]

_RULE = Fields(
    {"kind": OneOf(*native.RULES), **dict.fromkeys(native.FLOATS, Float32), "accumulate_last": bool}
)
Rules = Annotated[dict[TableName, Annotated[dict[str, Any], _RULE]], Length(MOST_TABLES)]
Steps = Annotated[dict[TableName, int], Length(MOST_TABLES)]

_DENSE_SETTINGS = Fields(
    {},
    {
        "lr_staleness": bool,
        "grads_to_wait": Nullable(Integer(1, 2**20)),
        "tolerance": Nullable(Integer(0, 2**31)),
        "pull_every": Integer(1, 2**31),
    },
)
Count = Annotated[int, Integer(1, 2**20)]
ModelNumber = Annotated[int, Integer(0, 2**31)]  # one whose dense parameters are on servers
MemberNumber = Annotated[int, Integer(0, 2**20)]  # in an elastic run the master gives out each number once


class TrainerHello(Head):
    """What each trainer says of itself and its run."""

    generation: GenerationNumber
    run: Annotated[str, Text(64)]
    trainer: MemberNumber
    trainers: Count


class RunHello(TrainerHello):
    """What a trainer says to those who store and look up rows."""

    trainers: Annotated[int, Integer(0, 2**20)]  # 0 in an elastic run, whose trainers come and go
    servers: Count
    mode: Annotated[str, OneOf(*MODES)] = SYNC.name
    staleness: Count = 1
    grad_reduce: Annotated[str, OneOf("mean", "key", "sum")] = "mean"
    dense: Annotated[dict[str, Any], _DENSE_SETTINGS] | None = None
    reload: bool = False
    line: Annotated[str, Text(40)] = ""
    elastic: bool = False


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

ColumnName = Annotated[str, Text(1000)]
_Column = tuple[Annotated[str, OneOf(*_PARTS, "plain", "reference")], Any]
BatchColumns = Annotated[dict[ColumnName, _Column], Length(2**16)]


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
