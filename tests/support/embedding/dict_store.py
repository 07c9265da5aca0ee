"""A store in plain torch: rows in dicts, ids as tensors, autograd for pooling; nothing of the native core."""

import numpy as np
import torch

from karvan.store.base import LocalTable, Store
from karvan.store.program import LookupPlan
from karvan.store.types import Capture, Found, GradientFlags, Push, Rows

COUNTERS = ("inserted", "evicted", "rejected", "dropped_gradients", "skipped_updates", "moved")


class _Row:
    def __init__(self, vector, state):
        self.vector, self.state, self.count, self.last = vector, state, 0, 0


class DictTable(LocalTable):
    """A table of float32 rows that start constant, without policies, for SGD and Adam."""

    def __init__(self, spec):
        super().__init__(spec.name)
        self.spec, self.rows, self._initial, self._version = spec, {}, torch.empty(0), 0
        self._removed = {}  # key → the version at which its row was removed
        self._counters = dict.fromkeys(COUNTERS, 0)

    def set_state(self, initial, fresh):
        self._initial = torch.tensor(initial, dtype=torch.float32)
        for row in self.rows.values():
            if fresh or len(row.state) != len(initial):
                row.state = self._initial.clone()

    def lookup(self, keys, counts, step):
        """Rows that are looked up in a training step are used once more."""
        vectors = np.zeros((len(keys), self.spec.dim), np.float32)
        for at, (key, count) in enumerate(zip(keys.tolist(), counts.tolist(), strict=True)):
            if step is not None:
                if key not in self.rows:
                    self.rows[key] = _Row(
                        torch.full((self.spec.dim,), self.spec.init[1]), self._initial.clone()
                    )
                    self._counters["inserted"] += 1
                self.rows[key].count += count
                self.rows[key].last = step
            if key in self.rows:
                vectors[at] = self.rows[key].vector.numpy()
        self._version += step is not None
        return Found(vectors, self._version)

    def apply(self, pushes, rule):
        total = {}
        for push in pushes:
            for key, gradient in zip(push.keys.tolist(), torch.from_numpy(push.gradients), strict=True):
                if self._removed.get(key, -1) > push.version:
                    self._counters["dropped_gradients"] += 1
                else:
                    total[key] = total.get(key, 0) + gradient
        for key, gradient in total.items():
            _step(rule, self.rows[key], gradient)
        self._version += 1

    def skip(self):
        self._counters["skipped_updates"] += 1

    def evict(self, *, step, now):
        return 0

    def _erase(self, keys):
        gone = [key for key in keys.tolist() if self.rows.pop(key, None) is not None]
        self._version += 1
        self._removed.update(dict.fromkeys(gone, self._version))
        self._counters["evicted"] += len(gone)
        return len(gone)

    def clear(self):
        self.erase(np.array(list(self.rows), np.int64))

    @property
    def version(self):
        return self._version

    def evicted_since(self, version):
        return np.array([key for key, at in self._removed.items() if at > version], np.int64)

    def _snapshot(self, part, parts):
        if parts != 1:
            raise ValueError(f"DictStore expects snapshots in one part, got {parts}.")
        rows = sorted(self.rows.items())
        widths = self.spec.dim, len(self._initial)
        vectors, state = (
            np.array([getattr(row, name).numpy() for _, row in rows], np.float32).reshape(len(rows), width)
            for name, width in zip(("vector", "state"), widths, strict=True)
        )
        counts, last = (
            np.array([getattr(row, name) for _, row in rows], np.uint32) for name in ("count", "last")
        )
        return Rows(np.array([key for key, _ in rows], np.int64), vectors, state, counts, last)

    def _load(self, rows):
        for key, vector, state, count, last in zip(*rows, strict=True):
            row = _Row(torch.from_numpy(vector.copy()), torch.from_numpy(state.copy()))
            row.count, row.last = int(count), int(last)
            self.rows[int(key)] = row
        self._version += 1

    def extra(self):
        return {}

    def load_extra(self, extra):
        assert not extra

    def stats(self):
        size = 4 * sum(len(row.vector) + len(row.state) for row in self.rows.values())
        return {"rows": len(self.rows), "bytes": size, **self._counters}


class DictStore(Store):
    """Tables in dicts."""

    takes_tensors = True

    def __init__(self):
        self._tables = {}

    def add_table(self, spec):
        known = self._tables.setdefault(spec.name, DictTable(spec)).spec
        expected = ("float32", "constant", "always", "never")
        if known != spec or (spec.dtype, spec.init[0], spec.admit[0], spec.evict[0]) != expected:
            raise ValueError(
                f"DictStore expects one table '{spec.name}' of {expected}, got {known} and {spec}."
            )

    def table(self, name):
        return self._tables[name]

    def lookup(self, keys, context):
        step = context.step if context.training else None
        return {table: self._tables[table].lookup(*asked, step) for table, asked in keys.items()}

    def prepare(self, program, inputs, context=None):
        return DictLookup(program, inputs)

    def forward(self, program, inputs, context):
        lookup = inputs if isinstance(inputs, DictLookup) else DictLookup(program, inputs)
        found = self.lookup(lookup.keys, context)
        lookup.pool({table: torch.from_numpy(each.vectors) for table, each in found.items()})
        return LookupPlan(None, {table: each.version for table, each in found.items()}, lookup)

    def hold(self, plan, gradients, scale=1.0):
        scaled = [None if g is None else g / scale for g in gradients]
        return plan.remote.gradients(scaled)

    def update(self, program, gradients, rules, steps):
        pushes = {}
        for slot, table in enumerate(program.tables):
            if table not in rules:
                continue
            if not all(one.finite()[slot] for _, one in gradients):
                self._tables[table].skip()
                continue
            pushes[table] = [
                Push(*one.sums[table], plan.versions[table]) for plan, one in gradients if table in one.sums
            ]
        self.apply(pushes, rules, steps)

    def apply(self, pushes, rules, steps):
        for table, listed in pushes.items():
            self._tables[table].apply(listed, rules[table])

    def capture(self, tables, parts, since=None, *, track=False):
        if since is not None:
            raise ValueError("DictStore does not know what has changed since a capture.")
        return DictCapture(
            {table: self._tables[table].snapshot(0, parts[table]) for table in tables},
            {table: self._tables[table].version for table in tables},
        )


class DictCapture(Capture):
    """A copy of all rows."""

    def __init__(self, rows, versions):
        self._rows, self.versions = rows, versions

    def part(self, table, part):
        return self._rows.pop(table)

    def erased(self, table):
        return np.empty(0, np.int64)

    def close(self):
        self._rows.clear()


class DictGradients(GradientFlags):
    """Distinct keys and their gradients, for tables that have any."""

    def __init__(self, tables, sums):
        finite = [table not in sums or bool(np.isfinite(sums[table][1]).all()) for table in tables]
        super().__init__(finite, [table in sums for table in tables])
        self.sums = sums


class DictLookup:
    """A batch: its distinct keys, then its outputs, which depend on the vectors of these by autograd."""

    plan = None

    def __init__(self, program, inputs):
        self._program, self._inputs = program, inputs
        self._places = [_Places(*pair) for pair in zip(program.features, inputs, strict=True)]
        self.keys, self._inverse = {}, {}
        for table in program.tables:
            users = [i for i, feature in enumerate(program.features) if feature.table == table]
            keys = [self._places[i].keys for i in users]
            unique, inverse, counts = torch.cat(keys).unique(return_inverse=True, return_counts=True)
            self.keys[table] = unique.numpy(), counts.numpy().astype(np.uint32)
            self._inverse.update(zip(users, inverse.split([len(each) for each in keys]), strict=True))

    def pool(self, vectors):
        with torch.enable_grad():
            self._leaves = {table: each.requires_grad_() for table, each in vectors.items()}
            self._outs = [self._pooled(i) for i in range(len(self._inputs))]

    def _pooled(self, i):
        feature, at = self._program.features[i], self._places[i]
        vectors = self._leaves[feature.table][self._inverse[i]].view(len(at.out), feature.stack, feature.dim)
        cells = vectors.sum(1) * at.weights[:, None]
        total = torch.zeros(at.outputs, feature.dim).index_add(0, at.out, cells)
        if feature.mode != "pooled" or feature.combiner == "sum":
            return total
        power = 1 if feature.combiner == "mean" else 2
        sums = torch.zeros(at.outputs).index_add(0, at.out, at.weights**power) ** (1 / power)
        return total / torch.where(sums > 0, sums, 1.0)[:, None]

    def take(self):
        return [(out.detach().clone(), one.layout) for out, one in zip(self._outs, self._inputs, strict=True)]

    def gradients(self, gradients):
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        touched = {self._program.features[i].table for i in given}
        leaves = {table: leaf for table, leaf in self._leaves.items() if table in touched}
        sums = torch.autograd.grad(
            [self._outs[i] for i in given], list(leaves.values()), [gradients[i] for i in given]
        )
        made = {}
        for table, values in zip(leaves, sums, strict=True):
            having = [self._inverse[i] for i in given if self._program.features[i].table == table]
            positions = torch.cat(having).unique().numpy()
            made[table] = self.keys[table][0][positions], values.numpy()[positions]
        return DictGradients(self._program.tables, made)


class _Places:
    """The ids of a feature that are looked up, their weights, and which vector of the output each adds to."""

    def __init__(self, feature, tensors):
        keys, weights, layout = tensors
        weights = torch.ones(layout.ids) if weights is None else weights
        lengths = layout.lengths()
        sample = torch.repeat_interleave(torch.arange(layout.samples), lengths)
        at = torch.arange(layout.ids) - (lengths.cumsum(0) - lengths)[sample]
        kept = at < layout.length if feature.mode == "padded" else torch.ones(layout.ids, dtype=torch.bool)
        self.keys = keys.view(layout.ids, feature.stack)[kept].reshape(-1)
        self.weights = weights[kept]
        self.outputs, self.out = {
            "pooled": (layout.samples, sample),
            "padded": (layout.samples * layout.length, (sample * layout.length + at)[kept]),
            "cells": (layout.ids, torch.arange(layout.ids)),
        }[feature.mode]


def _step(rule, row, gradient):
    gradient = gradient + rule.weight_decay * row.vector
    if rule.kind == "sgd":
        row.vector = row.vector - rule.lr * gradient
    elif rule.kind == "adam":
        first, second = row.state.chunk(2)
        first = rule.beta1 * first + (1 - rule.beta1) * gradient
        second = rule.beta2 * second + (1 - rule.beta2) * gradient**2
        row.state = torch.cat([first, second])
        row.vector = row.vector - rule.alpha * first / (second.sqrt() + rule.eps)
    else:
        raise ValueError(f"DictStore knows the rules sgd and adam, got {rule.kind}.")
