"""`UpdateCounts`: how many updates of each trainer a parameter server's tables contain.

With `on_server_loss: reload` a server that restarts has the rows of a checkpoint, and all updates since that
checkpoint are lost. Every server counts the pushes it has applied, by store and trainer. A capture takes the
counts along with the rows, the share of a checkpoint carries them in the manifest, and a server that is
restored from the checkpoint continues with them. So the counts always describe the rows: a trainer that knows
how many pushes it has made subtracts what each server contains, and the difference is what is lost.

Pushes are numbered within one run of the trainers, so a run does not use the counts in a checkpoint of
another run; its own start at zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from karvan.checkpoint.format.manifest import Manifest


class UpdateCounts:
    """Applied pushes, by store and trainer, of one run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._counts: dict[int, Counter[int]] = {}

    def add(self, store: int, trainer: int) -> None:
        """A push was applied."""
        self._counts.setdefault(store, Counter())[trainer] += 1

    def of(self, store: int) -> dict[str, int]:
        """By trainer, for JSON."""
        return {str(trainer): count for trainer, count in self._counts.get(store, {}).items()}

    def record(self, store: int) -> dict[str, Any]:
        """The counts, as a share of a checkpoint stores them."""
        return {"run": self._run, "store": store, "trainers": self.of(store)}

    def restore(self, manifest: Manifest, server: int, servers: int) -> None:
        """Continue with the counts of this server's share of a checkpoint."""
        self._counts = {}
        for table in manifest.tables.values():
            if len(table.updates) != servers:
                continue
            match table.updates[server]:
                case {"run": self._run, "store": int(store), "trainers": Mapping() as trainers}:
                    self._counts[store] = Counter({int(name): int(n) for name, n in trainers.items()})
