"""Where rows live: the `Store` protocol and its implementations, one file each."""

from __future__ import annotations

from collections.abc import Mapping

from karvan import distributed
from karvan.distributed.connection import require_gpu
from karvan.store.base import LocalTable, SharedStore, Store, StoredTable
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


def make_store(devices: Mapping[str, str | None]) -> Store:
    """A store of the kind that `kv.connect` has set up, or one in memory.

    devices: for each table "cpu", "cuda", or None for where the connection says.
    """
    connection = distributed.current()
    kind = connection.settings.kind
    if kind not in ("memory", "cuda"):
        if placed := [name for name, device in devices.items() if device is not None]:
            raise ValueError(
                'Table(device=…) is for kv.connect("memory") and kv.connect("cuda"), got tables with a '
                f'device ({", ".join(placed)}) and kv.connect("{kind}").'
            )
        if kind == "remote":
            from karvan.store.remote.store import RemoteStore  # imports Arrow Flight, which takes a while

            return RemoteStore(connection)
        if connection.settings.device == "cuda":
            from karvan.store.cuda.sharded import ShardedCudaStore  # imports triton

            return ShardedCudaStore(connection, device_memory=connection.settings.device_memory)
        return ShardedStore(connection)
    default = "cuda" if kind == "cuda" else "cpu"
    places = {name: device or default for name, device in devices.items()}
    capacity = connection.settings.capacity
    if "cuda" not in places.values():
        return MemoryStore(capacity=capacity)
    if capacity is not None:
        raise ValueError(
            f'kv.connect("memory", capacity={capacity}) counts the rows of tables in memory, got tables with '
            'device="cuda": use evict of a table.'
        )
    if asked := [name for name, device in devices.items() if device == "cuda"]:
        require_gpu(f'Table(device="cuda") of {", ".join(asked)}')
    from karvan.store.cuda.store import CudaStore  # imports triton

    on_device = CudaStore(device_memory=connection.settings.device_memory)
    if "cpu" not in places.values():
        return on_device
    from karvan.store.cuda.placed import PlacedStore

    return PlacedStore(MemoryStore(), on_device, places)
