"""Where rows live: the `Store` protocol and its implementations, one file each."""

from karvan.store.capture import Capture
from karvan.store.memory import MemoryStore
from karvan.store.protocol import Found, Plan, Program, Push, Rows, Store, TableSpec
from karvan.store.sharded import ShardedStore, make_store

__all__ = [
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
