"""Where rows live: the `Store` protocol and its implementations, one file each."""

from karvan.store.base import LocalTable, SharedStore, Store, StoredTable
from karvan.store.factory import make_store
from karvan.store.memory import MemoryStore
from karvan.store.messages import hashes_of
from karvan.store.program import LookupPlan, LookupProgram
from karvan.store.sharded import ShardedStore
from karvan.store.types import Capture, Found, LookupContext, Push, Rows, Rule, TableSpec

__all__ = [
    "Capture",
    "Found",
    "LocalTable",
    "LookupContext",
    "LookupPlan",
    "LookupProgram",
    "MemoryStore",
    "Push",
    "Rows",
    "Rule",
    "ShardedStore",
    "SharedStore",
    "Store",
    "StoredTable",
    "TableSpec",
    "hashes_of",
    "make_store",
]
