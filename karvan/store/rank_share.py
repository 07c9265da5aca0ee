"""`RankShare`: what stores whose tables are spread over ranks have in common.

Each rank holds the rows of its range of key hashes in a store of its own. Apart from batches, everything
concerns this rank's share alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from karvan import distributed
from karvan.distributed.connection import WIRES
from karvan.store.base import LocalTable, Store
from karvan.store.messages import hashes_of, owners_of
from karvan.store.types import Capture, Keys, Push, Rule, TableSpec, Vectors


class RankShare(Store):
    """A rank's share of every table, in a store `local`."""

    def __init__(self, connection: distributed.Connection, local: Store) -> None:
        self._connection = connection
        self._ranks = connection.world_size
        self._wire = WIRES[connection.settings.wire]
        self._by_key = connection.settings.grad_reduce == "key"
        self._averages = connection.settings.grad_reduce == "mean"  # over all ranks
        self._local = local
        self.crossing_keys = 0  # distinct keys of batches that were requested from other ranks, so far
        self.bytes_sent = 0  # to other ranks, so far

    @property
    @override
    def share(self) -> tuple[int, int]:
        return self._connection.rank, self._ranks

    @override
    def apply(
        self,
        pushes: Mapping[str, Sequence[Push]],
        rules: Mapping[str, Rule],
        steps: Mapping[str, int],
    ) -> None:
        """A collective. Versions are those of the owner's own table."""
        by_table: dict[str, list[Push]] = {}
        for table, listed in pushes.items():
            by_table[table] = []
            for push in listed:
                keys, values = self._by_owner([(push.keys, push.gradients)])[0]
                by_table[table].append(Push(keys, values, push.version))
        self._local.apply(by_table, rules, steps)

    def _send(self, floats: Tensor, to: list[int], of: list[int]) -> Tensor:
        channel = self._connection.here
        before = channel.bytes_sent
        received = channel.exchange(floats.to(self._wire), to, of).float()
        self.bytes_sent += channel.bytes_sent - before
        return received

    def _by_owner(self, listed: Sequence[tuple[Keys, Vectors]]) -> list[tuple[Keys, Vectors]]:
        """Send keys and gradients to their owners; returns those received, in the order of ranks."""
        channel = self._connection.here
        owners = [owners_of(hashes_of(keys), self._ranks) for keys, _ in listed]
        orders = [np.argsort(owner, kind="stable") for owner in owners]
        counts = np.stack([np.bincount(owner, minlength=self._ranks) for owner in owners], 1)
        received = channel.swap(torch.from_numpy(np.ascontiguousarray(counts, np.int64))).numpy()
        shares = []
        for slot, ((keys, values), order) in enumerate(zip(listed, orders, strict=True)):
            to, of, dim = counts[:, slot].tolist(), received[:, slot].tolist(), values.shape[1]
            theirs = channel.exchange(torch.from_numpy(keys[order]), to, of)
            scaled = torch.from_numpy(values[order] * np.float32(self._scale())).reshape(-1)
            floats = self._send(scaled, [n * dim for n in to], [n * dim for n in of])
            shares.append((theirs.numpy(), floats.numpy().reshape(-1, dim)))
        return shares

    def _scale(self) -> float:
        return 1.0 / self._ranks if self._averages else 1.0

    @override
    def add_table(self, spec: TableSpec) -> None:
        """Each rank holds its part of the rows that a policy allows."""
        self._local.add_table(spec.share(*self.share))
        # Without a reference to this store: a cycle would keep its rows until the next garbage collection.
        self.table(spec.name).owns = partial(_owned_by, *self.share)

    @override
    def table(self, name: str) -> LocalTable:
        table = self._local.table(name)
        assert isinstance(table, LocalTable)
        return table

    @override
    def capture(
        self,
        tables: Sequence[str],
        parts: Mapping[str, int],
        since: Mapping[str, int] | None = None,
        *,
        track: bool = False,
    ) -> Capture:
        """Of this rank's share."""
        return self._local.capture(tables, parts, since, track=track)


def _owned_by(rank: int, ranks: int, keys: Keys) -> NDArray[np.bool_]:
    mine: NDArray[np.bool_] = owners_of(hashes_of(keys), ranks) == rank
    return mine
