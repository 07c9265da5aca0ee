"""Chooses the store of an engine."""

from __future__ import annotations

from karvan import distributed
from karvan.store.base import Store
from karvan.store.memory import MemoryStore
from karvan.store.sharded import ShardedStore


def make_store() -> Store:
    """A store as `kv.connect` has it."""
    connection = distributed.current()
    if connection.settings.kind == "remote":
        from karvan.store.remote.store import RemoteStore  # with Flight, which others need not wait for

        return RemoteStore(connection)
    return ShardedStore(connection) if connection.settings.kind == "sharded" else MemoryStore()
