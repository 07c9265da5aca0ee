"""Rendezvous of ranks at a store that may hold keys of an earlier generation.

torchrun restarts ranks after one has died, and may give them the same store. Its keys then look like answers
of the new ranks, but are those of processes that have ended. So each process writes a random number: rank 0
writes a roll of all numbers it finds, again whenever one changes, until every rank has confirmed its own
number on the same roll. The roll's name is one that no earlier generation can have used.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time

from karvan.torch_internals import Store

_POLL = 0.01  # seconds between two reads


def agree_on_name(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that all ranks of this generation get, and no other process."""
    mine = secrets.token_hex(8)
    store.set(f"karvan/hello/{rank}", mine)
    until = time.monotonic() + timeout
    written = ""
    while time.monotonic() < until:
        if rank == 0:
            numbers = [_get(store, f"karvan/hello/{r}") for r in range(world)]
            name = hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:16]
            if all(numbers) and name != written:
                store.set("karvan/roll", json.dumps({"name": name, "numbers": numbers}))
                written = name
        roll = json.loads(_get(store, "karvan/roll") or "{}")
        if roll and len(roll["numbers"]) == world and roll["numbers"][rank] == mine:
            name = roll["name"]
            store.set(f"karvan/here/{name}/{rank}", "yes")
            if rank == 0 and all(_get(store, f"karvan/here/{name}/{r}") for r in range(world)):
                store.set(f"karvan/go/{name}", "yes")
            if _get(store, f"karvan/go/{name}"):
                return str(name)
        time.sleep(_POLL)
    raise TimeoutError(
        f"Rank {rank} expected all {world} ranks to join within {timeout:g} seconds, but they did not."
    )


def _get(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
