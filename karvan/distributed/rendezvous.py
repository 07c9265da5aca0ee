"""Rendezvous of ranks at a store that may hold keys of an earlier generation.

torchrun starts ranks again after one has died, and may give them the same store. What is in it then looks
like an answer, but nobody is there any more. So each process brings a number of its own: rank 0 writes a
roll of all numbers it finds, anew whenever one changes, until every rank has answered to its own number on
the same roll. The roll's name is one that no earlier generation can have used.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time

from karvan.torch_internals import Store

_LOOK = 0.01  # seconds between two looks


def meet(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that all ranks of this generation get, and nobody else."""
    mine = secrets.token_hex(8)
    store.set(f"karvan/hello/{rank}", mine)
    until = time.monotonic() + timeout
    called = ""
    while time.monotonic() < until:
        if rank == 0:
            numbers = [_get(store, f"karvan/hello/{r}") for r in range(world)]
            name = hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:16]
            if all(numbers) and name != called:
                store.set("karvan/roll", json.dumps({"name": name, "numbers": numbers}))
                called = name
        roll = json.loads(_get(store, "karvan/roll") or "{}")
        if roll and len(roll["numbers"]) == world and roll["numbers"][rank] == mine:
            name = roll["name"]
            store.set(f"karvan/here/{name}/{rank}", "yes")
            if rank == 0 and all(_get(store, f"karvan/here/{name}/{r}") for r in range(world)):
                store.set(f"karvan/go/{name}", "yes")
            if _get(store, f"karvan/go/{name}"):
                return str(name)
        time.sleep(_LOOK)
    raise TimeoutError(
        f"Rank {rank} expected all {world} ranks to meet within {timeout:g} seconds, but they did not."
    )


def _get(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
