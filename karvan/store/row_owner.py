"""`Owner`: lookups and updates of the rows that a process owns, for one caller or several.

A request is an ordinary batch for the native core: for each rank and table a feature of single ids, whose
keys, outputs and gradients are in the messages themselves. So keys that several ranks ask for are found or
inserted once, and gradients are added up in the order of ranks, which makes results the same from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from karvan.native import _native
from karvan.store import messages
from karvan.store.memory import MemoryStore
from karvan.store.messages import Numbers, features, floats, message_of
from karvan.store.program import LookupPlan, LookupProgram, empty, program_of_ranks
from karvan.store.types import Keys, LookupContext, Push, Rules, Vectors

Summed: TypeAlias = "_native.Gradients | dict[str, Push]"


@dataclass(frozen=True)
class Answered:
    """A lookup for some ranks, held until its gradients come."""

    program: LookupProgram
    plan: LookupPlan
    tables: Sequence[str]
    dims: list[int]
    asked: Numbers
    received: Sequence[Keys]  # the plan points into these
    vectors: Tensor  # for the first rank, then for the next; the plan points into it


class Owner:
    """Looks up and updates rows of a store for ranks that ask."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    def lookup(
        self,
        tables: Sequence[str],
        asked: Numbers,
        received: Sequence[Keys],
        context: LookupContext,
        log: _native.LookupLog | None = None,
    ) -> Answered:
        """Vectors for the keys that ranks ask for.

        asked: numbers of keys, by rank and table; received: the ranks' messages. log: records a training
        lookup whose batch is trained later.
        """
        dims = [self.store.table(table).spec.dim for table in tables]
        program = program_of_ranks(tuple(tables), tuple(dims), len(asked))
        vectors = empty(sum(floats(asked, dims)))
        inputs = features(asked, received, dims, vectors.data_ptr())
        plan = self.store.forward(program, inputs, context, log)
        return Answered(program, plan, tables, dims, asked, received, vectors)

    def reduce(
        self, answered: Answered, gradients: Sequence[Vectors], *, complete: bool, by_key: bool
    ) -> Summed:
        """Sum the ranks' gradients (one array each) by key, or average over the ranks that have a key.

        complete: no rank lacks a gradient; see `messages.py`.
        """
        if not complete:
            sums = messages.sums(answered.received, answered.asked, answered.dims, gradients, by_key)
            return {
                table: Push(*table_sums, self.store.table(table).version)
                for table, table_sums in zip(answered.tables, sums, strict=True)
            }
        addresses = []
        for flat, of_rank in zip(gradients, answered.asked, strict=True):
            at = flat.ctypes.data
            for count, dim in zip(of_rank, answered.dims, strict=True):
                addresses.append(at)
                at += 4 * count * dim
        assert answered.plan.native is not None
        owned = answered.plan.native.reduce(addresses, answered.dims * len(answered.asked))
        if by_key:
            owned.average()
        return owned

    def update(
        self,
        tables: Sequence[str],
        passes: Sequence[tuple[Answered, Summed]],
        rules: Rules,
        steps: Mapping[str, int],
    ) -> None:
        """Apply the sum of some backward passes to the tables that have a rule."""
        native = [
            (answered, gradient) for answered, gradient in passes if isinstance(gradient, _native.Gradients)
        ]
        if len(native) == len(passes):
            program = passes[0][0].program
            self.store.update(
                program, [(answered.plan, gradient) for answered, gradient in native], rules, steps
            )
            return
        pushes = {
            table: [_push(gradient, slot, table, self.store.table(table).version) for _, gradient in passes]
            for slot, table in enumerate(tables)
            if table in rules
        }
        self.store.apply(pushes, rules, steps)

    def present(self, keys: Mapping[str, Keys]) -> dict[str, NDArray[np.bool_]]:
        """Which keys of some tables have rows; nothing is changed."""
        counts = [len(table_keys) for table_keys in keys.values()]
        message = message_of(np.concatenate(list(keys.values())), 1)
        answered = self.lookup(list(keys), [counts], [message], LookupContext(training=False))
        summed = self.reduce(answered, [answered.vectors.numpy()], complete=True, by_key=False)
        assert isinstance(summed, _native.Gradients)
        # Of gradients that are merged, those of keys without a row are left out.
        merged = _native.Gradients.merge([summed])
        return {
            table: np.isin(table_keys, merged.keys_and_values(slot)[0])
            for slot, (table, table_keys) in enumerate(keys.items())
        }


def _push(summed: Summed, slot: int, table: str, version: int) -> Push:
    if isinstance(summed, dict):
        return summed[table]
    keys, values = summed.keys_and_values(slot)
    return Push(keys, values, version)
