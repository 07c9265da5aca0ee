"""Where rows live: the `Store` protocol and its implementations, one file each."""

from karvan.store.base import AwayStore, Found, Plan, Program, Push, Rows, Store, TableSpec
from karvan.store.capture import Capture
from karvan.store.factory import make_store
from karvan.store.memory import MemoryStore
from karvan.store.sharded import ShardedStore

__all__ = [
    "AwayStore",
    "Capture",
    "Found",
    "MemoryStore",
    "Plan",
    "Program",
    "Push",
    "Rows",
    "ShardedStore",
    "Store",
    "TableSpec",
    "make_store",
]
