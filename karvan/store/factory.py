"""`make_store`: chooses the store of an engine."""

from __future__ import annotations

from karvan import distributed
from karvan.store.base import Store
from karvan.store.memory import MemoryStore
from karvan.store.sharded import ShardedStore


def make_store() -> Store:
    """A store of the kind that `kv.connect` has set up, or one in memory."""
    connection = distributed.current()
    if connection.settings.kind == "remote":
        from karvan.store.remote.store import RemoteStore  # imports Arrow Flight, which takes a while

        return RemoteStore(connection)
    return ShardedStore(connection) if connection.settings.kind == "sharded" else MemoryStore()
