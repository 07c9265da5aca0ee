"""The launches of an update: rules, and the memory of sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.native import RULES
from karvan.store.cuda import launch
from karvan.store.cuda.batch_ids import LookupBuffers
from karvan.store.cuda.kernels import fields, update
from karvan.store.cuda.kernels.runs import drop_runs, note_changes, sum_pieces
from karvan.store.cuda.launch import Staging
from karvan.store.cuda.table_memory import DeviceTable
from karvan.store.types import RULE_NUMBERS, Rule

_FIELDS = fields.FEATURE_FIELDS.value
_HEAD = fields.HEAD.value
_RULE = update.RULE_FIELDS.value
# The constants of the kernels for a rule.
_KERNEL_RULES = {
    name: {"RULE": number, "STATE": columns, "ROW_STATE": row}
    for number, (name, (columns, row)) in enumerate(RULES.items())
}
_numbers = attrgetter(*RULE_NUMBERS)
_PADDING = (0,) * (_RULE - 1 - len(RULE_NUMBERS))


def check_state(table: DeviceTable, rule: Rule) -> None:
    """Raise unless the rows of a table have the optimizer state that a rule reads and writes."""
    kind, arena = table.checked_rule
    if kind == rule.kind and arena is table.arena:
        return
    columns, row = RULES[rule.kind]
    layout = table.arena.layout
    if columns * layout.dim + row != layout.state:
        raise ValueError(
            f"Table '{table.spec.name}': expected {layout.state} floats of optimizer state, got "
            f"{columns * layout.dim + row}."
        )
    table.checked_rule = (rule.kind, table.arena)


class SlotRules:
    """The rules of an update by the slots of tables, as the kernels read them; None: not updated.

    used: the slots that matter. kinds: of the rules there are. limits: whether one has something beside its
    formula. same: whether all of them have the same rule and step, which are then those of slot 0.
    """

    def __init__(
        self, rules: Sequence[Rule | None], steps: Sequence[int], used: Sequence[int] | None = None
    ) -> None:
        self.given = rules
        self.slots = len(rules)
        self._steps = steps
        self.numbers = np.zeros((self.slots, _RULE), np.float32)
        self.steps = np.zeros(self.slots, np.int64)
        chosen = range(self.slots) if used is None else used
        first, step = rules[chosen[0]], steps[chosen[0]]
        self.same = all(rules[slot] is first and steps[slot] == step for slot in chosen)
        if not self.same:
            self.numbers[:, 0] = -1
        present = []
        for place, slot in [(0, chosen[0])] if self.same else [(slot, slot) for slot in chosen]:
            rule = rules[slot]
            if rule is not None:
                kind = _KERNEL_RULES[rule.kind]["RULE"]
                self.numbers[place], self.steps[place] = (kind, *_numbers(rule), *_PADDING), steps[slot]
                present.append(rule)
        self.kinds = tuple(sorted({rule.kind for rule in present}))
        self.limits = any(r.clip_value or r.clip_norm or r.bound or r.weight_decay for r in present)

    def of_slots(self, used: Sequence[int]) -> SlotRules:
        """The rules of some slots, of which more may be the same."""
        if self.same and len(used) == self.slots:
            return self
        return SlotRules(self.given, self._steps, used)


def put_scale(head: NDArray[np.int64], scale: float | Tensor) -> None:
    """Write the number that gradients are divided by into a head: itself, or its address on the device."""
    inverse, address = (1.0, scale.data_ptr()) if isinstance(scale, Tensor) else (1.0 / scale, 0)
    head[fields.INVERSE_SCALE.value] = np.float64(inverse).view(np.int64)
    head[fields.SCALE.value] = address


class UpdateBuffers:
    """The memory of an update of one lookup's rows."""

    def __init__(self, lookup: LookupBuffers, slots: int, features: int, *, mapped: bool) -> None:
        self.lookup = lookup
        self._mapped = mapped
        self.staging: Staging | None = None  # of a graph, which copies `sent` itself
        device = lookup.memory.device
        self.partial = torch.empty(
            lookup.most_pieces, lookup.arena.layout.dim, dtype=torch.float32, device=device
        )
        size = _HEAD + 2 * slots + features * _FIELDS + slots * _RULE // 2
        self.sent = torch.empty(size, dtype=torch.int64, device=device)
        self.steps = self.sent[_HEAD:]
        self.versions = self.sent[_HEAD + slots :]
        self.rules = self.sent[_HEAD + 2 * slots :][: slots * _RULE // 2].view(torch.float32)
        self.features = self.sent[_HEAD + 2 * slots + slots * _RULE // 2 :]

    def load(
        self,
        plain_end: int,
        version: int,
        rules: SlotRules,
        descriptors: NDArray[np.int64],
        scale: float | Tensor,
        unless: Tensor | None = None,
    ) -> None:
        """Send rules and gradients to the device; version: see `GroupLookup`, unless: `GroupGradients`."""
        staging, slots = self.staging, rules.slots
        numbers = np.empty(self.sent.numel(), np.int64) if staging is None else staging.numbers()
        numbers[fields.PLAIN_END.value] = plain_end
        put_scale(numbers, scale)
        numbers[fields.FOUND_INF.value] = 0 if unless is None else unless.data_ptr()
        numbers[_HEAD : _HEAD + slots] = rules.steps
        numbers[_HEAD + slots : _HEAD + 2 * slots] = version
        end = _HEAD + 2 * slots + slots * _RULE // 2
        numbers[_HEAD + 2 * slots : end] = rules.numbers.reshape(-1).view(np.int64)
        numbers[end:] = descriptors.reshape(-1)
        if staging is None:
            self.lookup.memory.uploads.send_to(self.sent, numbers)

    def drop_runs(self) -> None:
        """Pass over the rows that are gone since the lookup, and count them."""
        memory, arena = self.lookup.memory, self.lookup.arena
        constants = arena.constants("SHIFT", "STRIDE")
        drop_runs[(memory.programs,)](
            *self._runs(), self.versions, memory.table_counters, arena.chunks, **constants
        )

    def note_changes(self, versions: NDArray[np.int64]) -> None:
        """Note that the rows change; versions: those of the tables, by their slots, after this update."""
        memory, arena = self.lookup.memory, self.lookup.arena
        constants = arena.constants("SHIFT", "STRIDE")
        note_changes[(memory.programs,)](
            *self._runs(), memory.uploads.send(versions), arena.chunks, **constants
        )

    def _runs(self) -> tuple[Tensor, ...]:
        """The runs of the lookup's positions, and the features that positions belong to."""
        at = self.lookup
        return at.work, at.order, at.starts, at.run_rows, self.features, at.feature_of

    def run(self, rules: SlotRules, aligned: bool) -> None:
        """Sum the gradients and update the rows."""
        at, arena = self.lookup, self.lookup.arena
        programs, columns = at.memory.update_programs, arena.layout.columns
        reads = (at.work, at.order, self.features, at.feature_of, at.out_rows, at.factors)
        shape = {**arena.constants("DIM", "COLUMNS"), "MAPPED": self._mapped, "ALIGNED": aligned}
        runs = (at.starts, at.run_rows, at.run_pieces, at.long_runs, self.partial, self.rules, self.steps)
        rows = (*runs, at.memory.table_counters, arena.chunks, self.sent)
        constants = arena.constants("SHIFT", "STRIDE", "VECTOR", "TYPE")
        constants |= {"LIMITS": rules.limits, "SAME": rules.same, **shape}

        def update_runs(count: int, long: bool) -> None:
            tile = launch.update_tile(columns, long)
            for kind in rules.kinds:
                update.update_rows[(count,)](
                    *reads, *rows, LONG=long, **_KERNEL_RULES[kind], **constants, **tile
                )

        # Long runs are summed and updated beside the others: together they use the memory best.
        side = at.memory.streams.side
        with launch.beside(side, [*at.shared, self.sent, self.partial, at.order]):
            pieces = (at.piece_starts, at.piece_ends, self.partial, self.sent)
            sum_pieces[(programs,)](*reads, *pieces, **shape, **launch.update_tile(columns))
            update_runs(max(2, programs // 8 + 1), long=True)
        update_runs(programs, long=False)
        launch.join(side)
