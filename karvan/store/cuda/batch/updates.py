"""The launches of an update: rules, and the memory of sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from karvan.native import RULES
from karvan.store.cuda import launch
from karvan.store.cuda.batch.buffers import LookupBuffers
from karvan.store.cuda.kernels import fields, update
from karvan.store.cuda.kernels.runs import drop_runs, note_changes
from karvan.store.cuda.kernels.sums import sum_pieces
from karvan.store.cuda.rows.tables import DeviceTable
from karvan.store.cuda.transfers import Staging
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
_DOUBLE, _INT64 = Struct("d"), Struct("q")


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
        if self.same:
            present = [] if first is None else [first]
            if first is not None:
                self.numbers[0], self.steps[0] = _rule_numbers(first), step
        else:
            self.numbers[:, 0] = -1
            present = []
            for slot in chosen:
                rule = rules[slot]
                if rule is not None:
                    self.numbers[slot], self.steps[slot] = _rule_numbers(rule), steps[slot]
                    present.append(rule)
        self.kinds = tuple(sorted({rule.kind for rule in present}))
        self.limits = any(r.clip_value or r.clip_norm or r.bound or r.weight_decay for r in present)

    def of_slots(self, used: Sequence[int]) -> SlotRules:
        """The rules of some slots, of which more may be the same."""
        if self.same and len(used) == self.slots:
            return self
        return SlotRules(self.given, self._steps, used)


def _rule_numbers(rule: Rule) -> tuple[float, ...]:
    return (_KERNEL_RULES[rule.kind]["RULE"], *_numbers(rule), *_PADDING)


def float_bits(number: float) -> int:
    """The bits of a double, for a head of int64 numbers."""
    return int(_INT64.unpack(_DOUBLE.pack(number))[0])


def put_scale(head: NDArray[np.int64], scale: float | Tensor) -> None:
    """Write the number that gradients are divided by into a head: itself, or its address on the device."""
    inverse, address = (1.0, scale.data_ptr()) if isinstance(scale, Tensor) else (1.0 / scale, 0)
    head[fields.INVERSE_SCALE.value] = float_bits(inverse)
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
        lookup, arena = self.lookup, self.lookup.arena
        drop_runs[(lookup.memory.programs,)](
            lookup.work,
            lookup.order,
            lookup.starts,
            lookup.run_rows,
            self.features,
            lookup.feature_of,
            self.versions,
            lookup.memory.table_counters,
            arena.chunks,
            lookup.memory.programs,
            SHIFT=arena.shift,
            STRIDE=arena.layout.stride,
        )

    def note_changes(self, versions: NDArray[np.int64]) -> None:
        """Note that the rows change; versions: those of the tables, by their slots, after this update."""
        lookup, arena = self.lookup, self.lookup.arena
        note_changes[(lookup.memory.programs,)](
            lookup.work,
            lookup.order,
            lookup.starts,
            lookup.run_rows,
            self.features,
            lookup.feature_of,
            lookup.memory.uploads.send(versions),
            arena.chunks,
            lookup.memory.programs,
            SHIFT=arena.shift,
            STRIDE=arena.layout.stride,
        )

    def run(self, rules: SlotRules, aligned: bool) -> None:
        """Sum the gradients and update the rows."""
        lookup, arena = self.lookup, self.lookup.arena
        layout = arena.layout
        programs = lookup.memory.update_programs
        long_programs = max(2, programs // 8 + 1)
        reads = (lookup.order, self.features, lookup.feature_of, lookup.out_rows, lookup.factors)
        shape = {
            "DIM": layout.dim,
            "COLUMNS": layout.columns,
            "MAPPED": self._mapped,
            "ALIGNED": aligned,
        }
        short, long = launch.update_tile(layout.columns), launch.update_tile(layout.columns, long=True)
        numbers = {
            "SHIFT": arena.shift,
            "STRIDE": layout.stride,
            "VECTOR": layout.vector,
            "TYPE": layout.type,
            "LIMITS": rules.limits,
            "SAME": rules.same,
        }
        rows = (
            lookup.work,
            *reads,
            lookup.starts,
            lookup.run_rows,
            lookup.run_pieces,
            lookup.long_runs,
            self.partial,
            self.rules,
            self.steps,
            lookup.memory.table_counters,
            arena.chunks,
            self.sent,
            programs,
        )
        # Long runs are summed and updated beside the others: together they use the memory best.
        side = lookup.memory.streams.side
        with launch.beside(side, [*lookup.shared, self.sent, self.partial, lookup.order]):
            sum_pieces[(programs,)](
                lookup.work,
                *reads,
                lookup.piece_starts,
                lookup.piece_ends,
                self.partial,
                self.sent,
                programs,
                **shape,
                **short,
            )
            for kind in rules.kinds:
                update.update_rows[(long_programs,)](
                    *rows[:-1],
                    long_programs,
                    LONG=True,
                    **_KERNEL_RULES[kind],
                    **numbers,
                    **shape,
                    **long,
                )
        for kind in rules.kinds:
            update.update_rows[(programs,)](
                *rows, LONG=False, **_KERNEL_RULES[kind], **numbers, **shape, **short
            )
        launch.join(side)
