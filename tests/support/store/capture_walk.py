"""Random changes of tables while captures are open, compared with dicts that were copied at the moment."""

from __future__ import annotations

import numpy as np
import torch

import karvan as kv
from karvan.store import LookupContext, Push, Rows, Rule

SPECS = {  # two tables that share memory, and one of 16 bits
    "a": kv.Table(2, init=kv.init.Uniform(-1.0, 1.0)).spec("a", 0, 4),
    "b": kv.Table(2, init=kv.init.Uniform(-1.0, 1.0), evict=kv.eviction.Age(2, every=1 << 30)).spec(
        "b", 0, 4
    ),
    "c": kv.Table(3, init=kv.init.Uniform(-1.0, 1.0), dtype=torch.float16).spec("c", 0, 4),
}
KEYS = 60
PARTS = 4


def as_dict(rows):
    """Rows by key, all they have as bytes."""
    return {
        key: (vector.tobytes(), state.tobytes(), int(count), int(last))
        for key, vector, state, count, last in zip(*rows, strict=True)
    }


class CaptureWalk:
    """A store, its captures that are open, and what each must return."""

    def __init__(self, store, source):
        self.store = store
        self.source = source
        self.step = 0
        self.kinds = dict.fromkeys(SPECS, "sgd")
        self.in_flight = []
        self.open = []  # [capture, rows of each table then, what was read of each, the delta's base]
        self.base = {}  # tables' versions at their last capture, and their rows
        for spec in SPECS.values():
            store.add_table(spec)
        self.look()
        self.update()

    def keys(self, most=12):
        return np.array(self.source.sample(range(KEYS), self.source.randint(1, most)))

    def look(self):
        """A training lookup, whose gradients are in flight then."""
        self.step += 1
        asked = {}
        for name in SPECS:
            keys = self.keys()
            asked[name] = keys, np.ones(len(keys), np.uint32)
        found = self.store.lookup(asked, LookupContext(True, self.step))
        self.in_flight.append({name: (asked[name][0], found[name].version) for name in SPECS})

    def update(self):
        pushes = {name: [] for name in SPECS}
        for lookup in self.in_flight:
            for name, (keys, version) in lookup.items():
                shape = (len(keys), SPECS[name].dim)
                values = np.array(
                    [self.source.uniform(-1, 1) for _ in range(shape[0] * shape[1])], np.float32
                )
                pushes[name].append(Push(keys, values.reshape(shape), version))
        self.in_flight = []
        rules = {}
        for name in SPECS:
            rules[name] = Rule(self.kinds[name], eps=1.0)
            rules[name].lr = 0.5
        self.store.apply(pushes, rules, dict.fromkeys(SPECS, self.step))

    def erase(self):
        self.store.table(self.source.choice("abc")).erase(self.keys())

    def evict(self):
        self.store.table("b").evict(step=self.step, now=0.0)

    def clear(self):
        self.store.table(self.source.choice("abc")).clear()

    def load(self):
        name, keys = self.source.choice("abc"), self.keys()
        state = self.store.table(name).snapshot().state.shape[1]
        numbers = np.random.default_rng(self.source.randint(0, 99))
        rows = Rows(
            keys,
            numbers.random((len(keys), SPECS[name].dim), np.float32),
            numbers.random((len(keys), state), np.float32),
            np.full(len(keys), 7, np.uint32),
            np.full(len(keys), self.step, np.uint32),
        )
        self.store.table(name).load(rows)

    def set_state(self):
        """Another optimizer: rows get other memory."""
        name = self.source.choice("abc")
        self.kinds[name] = kind = self.source.choice(["sgd", "momentum", "adagrad"])
        size = 0 if kind == "sgd" else SPECS[name].dim
        self.store.table(name).set_state([0.25] * size, fresh=self.source.random() < 0.5)

    def snapshots(self, names):
        return {name: as_dict(self.store.table(name).snapshot()) for name in names}

    def capture(self):
        """Of tables that have none: all rows, or what changed since their last one."""
        busy = {name for entry in self.open for name in entry[1]}
        names = [name for name in SPECS if name not in busy]
        if not names:
            return
        names = self.source.sample(names, self.source.randint(1, len(names)))
        since = None
        if self.source.random() < 0.5 and all(name in self.base for name in names):
            since = {name: self.base[name][0] for name in names}
        bases = {} if since is None else {name: self.base[name][1] for name in names}
        moment = self.snapshots(names)
        capture = self.store.capture(names, dict.fromkeys(names, PARTS), since, track=True)
        for name in names:
            self.base[name] = capture.versions[name], moment[name]
        self.open.append([capture, moment, {name: [] for name in names}, bases])

    def read(self):
        """One part of one table."""
        left = [
            (entry, name) for entry in self.open for name, parts in entry[2].items() if len(parts) < PARTS
        ]
        if left:
            (capture, _, parts, _), name = self.source.choice(left)
            parts[name].append(capture.part(name, len(parts[name])))

    def close(self):
        """Read all of a capture, and compare."""
        if not self.open:
            return
        capture, moment, read, bases = self.open.pop(self.source.randrange(len(self.open)))
        for name, parts in read.items():
            while len(parts) < PARTS:
                parts.append(capture.part(name, len(parts)))
            found = {}
            for part in parts:
                found |= as_dict(part)
            if name in bases:
                gone = set(capture.erased(name).tolist())
                found = {key: row for key, row in bases[name].items() if key not in gone} | found
            assert found == moment[name], name
        capture.close()

    def abandon(self):
        """Close a capture that was not read to its end."""
        if self.open:
            self.open.pop()[0].close()

    ACTIONS = (
        *("look", "update", "look", "update", "read", "read", "read", "capture", "capture", "close"),
        *("erase", "evict", "clear", "load", "set_state", "abandon"),
    )

    def run(self, length):
        self.capture()
        for _ in range(length):
            getattr(self, self.source.choice(self.ACTIONS))()
        while self.open:
            self.close()
