"""Which store an engine gets."""

from __future__ import annotations

from collections.abc import Callable

from karvan import ranks
from karvan.store.memory import MemoryStore
from karvan.store.protocol import Store
from karvan.store.remote import RemoteStore
from karvan.store.sharded import ShardedStore


def make_store() -> Store:
    """A store as `kv.connect` has it."""
    connection = ranks.current()
    kinds: dict[str, Callable[[ranks.Connection], Store]] = {"sharded": ShardedStore, "remote": RemoteStore}
    made = kinds.get(connection.settings.kind)
    return made(connection) if made else MemoryStore()
