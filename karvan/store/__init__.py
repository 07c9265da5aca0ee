"""Where rows live: the `Store` protocol and its implementations, one file each."""

from karvan.store.base import (
    Found,
    LookupPlan,
    LookupProgram,
    Push,
    Rows,
    Rule,
    SharedStore,
    Store,
    TableSpec,
)
from karvan.store.capture import Capture
from karvan.store.exchange.key_sharding import hashes_of
from karvan.store.factory import make_store
from karvan.store.memory import MemoryStore
from karvan.store.sharded import ShardedStore

__all__ = [
    "Capture",
    "Found",
    "LookupPlan",
    "LookupProgram",
    "MemoryStore",
    "Push",
    "Rows",
    "Rule",
    "ShardedStore",
    "SharedStore",
    "Store",
    "TableSpec",
    "hashes_of",
    "make_store",
]
