"""`TableReads`: training lookups that change nothing in the tables.

A key without a row gets the vector that its row will start with, which depends on the key alone. Whether it
will have a row can depend on how often the key is used, or on the step: with admission by a minimum count,
or by chance at each step, a key without a row reads as zeros, until a commit has given it a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from karvan.cluster.parameter_server.server_tables import ServerTables
from karvan.native import _native
from karvan.store import TableSpec
from karvan.store.exchange.row_owner import Owner
from karvan.store.types import Keys, LookupContext, Vectors

_BY_KEY = ("always", "probability")  # admissions that depend on the key alone


class _Zeros(NamedTuple):
    """Keys of a table that may have no row, as their vectors begin with 0; all vectors; their places."""

    keys: Keys
    vectors: Vectors
    places: NDArray[np.int64]


class TableReads:
    """Vectors for training, from the tables of a server; for one thread at a time."""

    def __init__(self, owner: Owner, tables: ServerTables) -> None:
        self._owner = owner
        self._tables = tables
        self._scratch: dict[str, tuple[TableSpec, _native.Table]] = {}

    def read(self, tables: Sequence[str], counts: Sequence[int], message: Keys) -> Tensor:
        """The vectors of a message's keys, one table after the other."""
        answered = self._owner.lookup(tables, [list(counts)], [message], LookupContext(training=False))
        flat = answered.vectors.numpy()
        key = start = 0
        zeros: dict[str, _Zeros] = {}
        for table, count, dim in zip(tables, counts, answered.dims, strict=True):
            if self._tables.spec(table).admit[0] in _BY_KEY:
                vectors = flat[start : start + count * dim].reshape(count, dim)
                places = np.flatnonzero(vectors[:, 0] == 0)
                if len(places):
                    zeros[table] = _Zeros(message[key : key + count][places], vectors, places)
            key += count
            start += count * dim
        if zeros:
            self._fill(zeros)
        return answered.vectors

    def _fill(self, zeros: Mapping[str, _Zeros]) -> None:
        """Write initial vectors where keys have no row; lookups have left zeros there."""
        present = self._owner.present({table: each.keys for table, each in zeros.items()})
        for table, (keys, vectors, places) in zeros.items():
            absent = ~present[table]
            if absent.any():
                vectors[places[absent]] = self._initial(self._tables.spec(table), keys[absent])

    def _initial(self, spec: TableSpec, keys: Keys) -> Vectors:
        """What a table would insert for these keys; zeros for those that it would not admit."""
        if spec.admit[0] == "always" and spec.dtype == "float32":
            return spec.initial_vectors(keys)
        # As the native table itself admits and rounds: a table of the same name, emptied each time.
        known, table = self._scratch.get(spec.name, (None, None))
        if known != spec or table is None:
            table = _native.Table(
                spec.name, spec.dim, spec.dtype, spec.init, spec.seed, spec.admit, ("never", 0.0, 1), 1
            )
            self._scratch[spec.name] = spec, table
        unique, inverse = np.unique(keys, return_inverse=True)
        vectors, _ = table.lookup(unique, np.ones(len(unique), np.uint32), True, 0, 0.0)
        table.clear()
        made: Vectors = vectors[inverse]
        return made
