"""Values that calls of several services have in common: names and numbers, tables, rules, a trainer's hello.

Bounds follow from the types of the native core: its floats have 32 bits, its steps 32 or 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from karvan.job.sync_modes import MODES
from karvan.native import rules
from karvan.protocol.registry import GENERATION
from karvan.wire.errors import RefusedError
from karvan.wire.schema.kinds import (
    FLOAT32_MAX,
    Boolean,
    Fields,
    Float,
    Integer,
    ListOf,
    MapOf,
    Nullable,
    OneOf,
    Text,
    TupleOf,
)

MOST_DIM = 65536
MOST_TABLES = 4096
_MOST_STATE = max(columns * MOST_DIM + row for columns, row in rules.RULES.values())  # floats of a row

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
# The tables that a restarted server must have, by name.
DECLARED = MapOf(Fields({"spec": SPEC}, {"initial": STATE}), MOST_TABLES, TABLE)

RULE = Fields(
    {
        "kind": OneOf(*rules.RULES),
        **dict.fromkeys(rules.FLOATS, FLOAT32),
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
TRAINER_HELLO = {
    "generation": GENERATION,
    "run": RUN,
    "trainer": MEMBER,
    "trainers": Integer(1, 2**20),
}
TRAINER_OPTIONS = {
    "mode": OneOf(*MODES),
    "staleness": Integer(1, 2**20),
    "grad_reduce": OneOf("mean", "key", "sum"),
    "divisor": Integer(1, 2**20),
    "dense": DENSE_SETTINGS,
    "reload": Boolean(),
    "line": Text(40),
}


def words(keys: int) -> int:
    """How many 64-bit words this many keys and their 32-bit use counts take."""
    return keys + (keys + 1) // 2


def wire_dtype(head: Mapping[str, Any]) -> str:
    """The dtype in which floats are sent; two-byte floats are sent as uint16."""
    return "float32" if head["wire"] == "float32" else "uint16"


def expect_distinct(what: str, names: Sequence[Any]) -> None:
    """A RefusedError if one occurs twice."""
    if len(set(names)) != len(names):
        twice = next(each for number, each in enumerate(names) if each in names[:number])
        raise RefusedError(f"expected each of {what} once, got {twice!r} twice.")


def expect_same_names(what: str, names: Mapping[str, Any], other: str, others: Mapping[str, Any]) -> None:
    """A RefusedError unless two parts of a head name the same tables."""
    if set(names) != set(others):
        odd = sorted(set(names) ^ set(others))[0]
        raise RefusedError(f"expected {what} and {other} of the same tables, got '{odd}' in one of them.")


def expect_declared_names(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """A RefusedError unless each table has the name of its spec."""
    for name, table in tables.items():
        if table["spec"]["name"] != name:
            raise RefusedError(
                f"expected the spec of table '{name}', got the spec of '{table['spec']['name']}'."
            )
