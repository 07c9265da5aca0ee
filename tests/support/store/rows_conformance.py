"""What a store must do with the rows of distinct keys: insert, count, update, erase, list and load them."""

from collections import Counter

import numpy as np
import pytest
import torch
from reference import SGD, ReferenceTable, check_table, mix, signed
from store_kinds import also_slowly, explore, memory

import karvan as kv
from karvan.store import LookupContext, Push, Rows, Rule

LR = 0.5  # and gradients in eighths: all sums are exact, in any order
INIT = 0.25


def unmix(hashed):
    """The key of a hash, as int64."""
    hashed ^= hashed >> 32
    for _ in range(2):
        hashed = hashed * 0xCFEE444D8B59A89B & (1 << 64) - 1
        hashed ^= hashed >> 32
    return signed(hashed)


# Hashes 0 and 1 are special to some indexes, as are the keys -1 and -2 to others; the last four collide.
SPECIAL = [unmix(0), unmix(1), -1, -2, -(2**63), 2**63 - 1, *(unmix(h) for h in (2, 3, 2**64 - 1, 2**63))]
SPECIAL += [unmix(h << 40 | 5) for h in range(1, 5)]
KEYS = list(dict.fromkeys([*range(6), *SPECIAL]))
INITS = {
    "constant": kv.init.Constant(-0.7),
    "uniform": kv.init.Uniform(-0.3, 0.7),
    "xavier uniform": kv.init.XavierUniform(),
    "kaiming uniform": kv.init.KaimingUniform(),
    "normal": kv.init.Normal(0.5, 2.0),
    "xavier normal": kv.init.XavierNormal(),
    "truncated": kv.init.TruncatedNormal(1.0, 0.5),
    "truncated far away": kv.init.TruncatedNormal(0.0, 0.02, -2.0, 2.0),
    "gamma": kv.init.Gamma(2.5, 0.3),
    "gamma below 1": kv.init.Gamma(0.3, 0.2, 0.01, 0.5),
    "poisson": kv.init.Poisson(3.5, high=7.0),
    "truncated to a range": kv.init.TruncatedNormal(0.0, 1.0, -0.5, 2.0),
}


def rule():
    made = Rule("sgd")
    made.lr = LR
    return made


QUICK_INITS = ("uniform", "normal", "truncated to a range", "gamma below 1", "poisson")


class Rig:
    """A store with the table t, and its reference."""

    def __init__(self, kind, dim=2, **options):
        self.kind = kind
        self.dim = dim
        self.spec = kv.Table(dim, init=kv.init.Constant(INIT), **options).spec("t", 0, 4)
        self.store = self.fresh()
        self.table = ReferenceTable(dim, SGD(lr=LR), lambda key: torch.full((dim,), INIT))
        self.step = 0
        self.passes = []  # of lookups that were not trained yet: keys, version, rows that were there

    def fresh(self):
        store = self.kind.make()
        store.add_table(self.spec)
        return store

    def see(self, keys, uses=None):
        """A training lookup."""
        self.step += 1
        uses = np.ones(len(keys), np.uint32) if uses is None else uses
        found = self.look(keys, uses, training=True)
        self.table.see(Counter(dict(zip(keys, uses.tolist(), strict=True))), self.step)
        assert found.vectors.tolist() == [self.table.vector(key).tolist() for key in keys]
        self.passes.append((keys, found.version, dict(self.table.rows)))

    def look(self, keys, uses=None, training=False):
        uses = np.ones(len(keys), np.uint32) if uses is None else uses
        asked = {"t": (np.array(keys, np.int64), uses)}
        return self.store.lookup(asked, LookupContext(training, self.step))["t"]

    def update(self, source):
        """Apply gradients of all lookups so far; those of rows that have left since are dropped."""
        total, pushes = {}, []
        for keys, version, rows in self.passes:
            values = np.array(
                [[source.randint(-8, 8) / 8 for _ in range(self.dim)] for _ in keys], np.float32
            )
            pushes.append(Push(np.array(keys, np.int64), values.reshape(-1, self.dim), version))
            for key, value in zip(keys, values, strict=True):
                if self.table.rows.get(key) is rows[key]:
                    total[key] = total.get(key, 0) + torch.from_numpy(value)
                else:
                    self.table.dropped += 1
        self.store.apply({"t": pushes}, {"t": rule()}, {"t": self.step})
        self.table.apply(total)
        self.passes = []

    def erase(self, keys):
        there = set(keys) & set(self.table.rows)
        version = self.store.table("t").version
        assert self.store.table("t").erase(np.array(keys, np.int64)) == len(there)
        assert sorted(self.store.table("t").evicted_since(version).tolist()) == sorted(there)
        self.table.evict(keys)

    def check(self):
        check_table(self, self.table)
        assert self.store.table("t").stats()["dropped_gradients"] == self.table.dropped

    # What `check_table` asks of a table.

    def snapshot(self):
        return self.store.table("t").snapshot()

    @property
    def rows(self):
        return self.store.table("t").stats()["rows"]


def assert_same_rows(one, other):
    for name, left, right in zip(Rows._fields, one, other, strict=True):
        assert left.dtype == right.dtype, name
        assert np.array_equal(left, right), name


def random_keys(source, most=6):
    return source.sample(KEYS, source.randint(1, most))


class RowsConformance:
    """Tests of rows by their keys, for a `StoreKind`."""

    def test_a_table_is_a_dict_of_rows(self, kind):
        explore(lambda source: _walk(Rig(kind), source, kind.few(25, 10)), kind.few(15, 4), not kind.slow)

    def test_special_keys_and_hashes(self, kind, source):
        assert [mix(key) for key in SPECIAL[:2]] == [0, 1]
        assert SPECIAL[0] == 0
        rig = Rig(kind, dim=3)
        assert not rig.look(SPECIAL).vectors.any()
        rig.see(SPECIAL[::2])
        rig.see(SPECIAL)
        rig.update(source)
        rig.check()
        assert rig.look(SPECIAL).vectors.tolist() == [rig.table.vector(key).tolist() for key in SPECIAL]
        rig.erase(SPECIAL[::3])
        rig.check()
        assert rig.look(SPECIAL).vectors.tolist() == [rig.table.vector(key).tolist() for key in SPECIAL]
        rig.see(SPECIAL)
        rig.check()

    def test_no_keys_at_all(self, kind, source):
        rig = Rig(kind)
        rig.see([])
        rig.update(source)
        assert rig.look([]).vectors.shape == (0, 2)
        assert rig.store.table("t").erase(np.zeros(0, np.int64)) == 0
        rig.store.table("t").load(rig.snapshot())
        rig.check()

    def test_counts_stop_at_their_largest_value(self, kind):
        rig = Rig(kind)
        for _ in range(2):
            rig.look([7], np.array([2**32 - 2], np.uint32), training=True)
        assert rig.snapshot().counts.tolist() == [2**32 - 1]

    def test_growth_over_many_steps(self, kind, source):
        """Keys are found, inserted and erased while the index grows."""
        rig = Rig(kind)
        known = 0
        for _ in range(kind.few(40, 10)):
            size = source.randint(30, 150)
            rig.see([*range(max(0, known - 20), known), *range(known, known + size)])
            known += size
            rig.erase(source.sample(range(known), 15))
            rig.passes = rig.passes[-1:]
        rig.update(source)
        rig.check()
        assert rig.store.table("t").stats()["moved"] > 0

    def test_stats_count_what_happened(self, kind):
        rig = Rig(kind)
        rig.see([1, 2, 3])
        rig.see([3, 4])
        rig.erase([1, 9])
        rig.store.table("t").skip()
        rig.store.table("t").load(rig.snapshot())
        stats = rig.store.table("t").stats()
        expected = {"rows": 3, "inserted": 4, "evicted": 1, "rejected": 0, "dropped_gradients": 0}
        assert {name: stats[name] for name in expected} == expected
        assert stats["skipped_updates"] == 1
        assert stats["bytes"] > 0
        assert rig.store.sizes(["t"]) == {"t": 3}

    def test_clear_removes_all_rows_and_says_which(self, kind, source):
        rig = Rig(kind)
        rig.see(KEYS)
        version = rig.store.table("t").version
        rig.store.table("t").clear()
        assert rig.store.table("t").version > version
        assert sorted(rig.store.table("t").evicted_since(version).tolist()) == sorted(KEYS)
        rig.table.rows.clear()
        rig.check()
        rig.see([1, 5])
        rig.update(source)  # the gradients of the first lookup are dropped
        rig.check()
        assert rig.store.table("t").stats()["evicted"] == len(KEYS)

    def test_versions_grow_with_every_change(self, kind, source):
        rig = Rig(kind)
        versions = [rig.store.table("t").version]
        for change in (
            lambda: rig.see([1, 2]),
            lambda: rig.update(source),
            lambda: rig.erase([1]),
            lambda: rig.store.table("t").load(rig.snapshot()),
            lambda: rig.store.table("t").clear(),
        ):
            change()
            versions.append(rig.store.table("t").version)
        assert versions == sorted(set(versions))

    def test_snapshot_parts_make_up_the_whole_and_load_elsewhere(self, kind, source):
        rig = Rig(kind, dim=5)
        rig.see(list(range(-60, 60)))
        rig.see(SPECIAL)
        rig.update(source)
        whole = rig.snapshot()
        hashes = [mix(key) for key in whole.keys.tolist()]
        assert hashes == sorted(hashes)
        for parts in (1, 3, 8):
            some = [rig.store.table("t").snapshot(part, parts) for part in range(parts)]
            assert_same_rows(Rows(*map(np.concatenate, zip(*some, strict=True))), whole)
        other = rig.fresh()
        for part in reversed(some):
            other.table("t").load(part)
        assert_same_rows(other.table("t").snapshot(), whole)
        with pytest.raises(ValueError, match="part"):
            rig.store.table("t").snapshot(3, 3)

    def test_loads_overwrite_rows_and_refuse_wrong_ones(self, kind):
        rig = Rig(kind)
        rig.see([1, 2, 3])
        rows = Rows(
            np.array([3, 9]),
            np.array([[1.0, 2.0], [3.0, 4.0]], np.float32),
            np.zeros((2, 0), np.float32),
            np.array([5, 6], np.uint32),
            np.array([7, 8], np.uint32),
        )
        rig.store.table("t").load(rows)
        assert rig.look([1, 3, 9]).vectors.tolist() == [[INIT, INIT], [1.0, 2.0], [3.0, 4.0]]
        after = rig.snapshot()
        noted = dict(zip(after.keys.tolist(), zip(after.counts, after.last_steps, strict=True), strict=True))
        assert noted == {1: (1, 1), 2: (1, 1), 3: (5, 7), 9: (6, 8)}
        with pytest.raises(ValueError, match="twice"):
            rig.store.table("t").load(Rows(*(np.concatenate([part, part]) for part in rows)))
        with pytest.raises(ValueError, match="'t'"):
            rig.store.table("t").load(rows._replace(vectors=np.zeros((2, 3), np.float32)))
        with pytest.raises(ValueError, match="'t'"):
            rig.store.table("t").load(rows._replace(state=np.zeros((2, 1), np.float32)))

    def test_optimizer_state_is_kept_or_replaced(self, kind):
        rig = Rig(kind)
        rig.store.table("t").set_state([0.5, 0.5], fresh=False)  # without rows
        rig.see([1, 2])
        before = rig.snapshot()
        assert before.state.tolist() == [[0.5, 0.5]] * 2
        rig.store.table("t").set_state([0.75, 0.75], fresh=False)  # rows have state of this size
        rig.see([3])
        assert sorted(rig.snapshot().state.tolist()) == [[0.5, 0.5]] * 2 + [[0.75, 0.75]]
        rig.store.table("t").set_state([0.1, 0.2], fresh=True)
        assert np.array_equal(rig.snapshot().state, np.array([[0.1, 0.2]] * 3, np.float32))
        rig.store.table("t").set_state([1.0], fresh=False)  # another size
        rig.see([4])
        after = rig.snapshot()
        assert after.state.tolist() == [[1.0]] * 4
        rig.store.table("t").set_state([], fresh=False)
        assert rig.snapshot().state.shape == (4, 0)
        rig.passes = []
        rig.check()
        stats = rig.store.table("t").stats()
        assert [stats[name] for name in ("rows", "inserted", "evicted")] == [4, 4, 0]

    def test_gradients_reach_their_rows_after_new_optimizer_state(self, kind):
        """A program may change the optimizer between forward and backward; no row gets another's gradient."""
        engine = kv.EmbeddingEngine({"f": kv.Table(2, init=kv.init.Constant(0.0))}, store=kind.make())
        kv.optim.SGD(engine, lr=1.0, momentum=0.5)
        engine({"f": torch.arange(10)})
        engine.table("f").evict_keys([2, 3, 4])
        out = engine({"f": torch.tensor([7, 8, 9])})["f"]
        opt = kv.optim.Adagrad(engine, lr=1.0)  # state of the same size, of another kind
        out.sum().backward()
        opt.step()
        moved = engine.table("f").vectors(torch.arange(10)).abs().sum(1)
        dropped = engine.table("f").stats()["dropped_gradients"]
        assert moved[:7].tolist() == [0.0] * 7
        assert int((moved[7:] > 0).sum()) + dropped == 3

    def test_a_rule_for_which_rows_have_no_state_is_refused(self, kind):
        rig = Rig(kind)
        rig.see([1, 2])
        push = Push(np.array([1, 2]), np.ones((2, 2), np.float32), rig.store.table("t").version)
        for name in ("momentum", "adagrad", "adam", "ftrl"):
            with pytest.raises(ValueError, match=r"'t'.*floats of optimizer state"):
                rig.store.apply({"t": [push]}, {"t": Rule(name, eps=1.0)}, {"t": 1})
        rig.check()

    def test_new_optimizer_state_of_one_table_leaves_the_gradients_of_others(self, kind):
        start = kv.init.Constant(0.0)
        tables = {"x": kv.Table(2, init=start), "y": kv.Table(2, init=start)}
        engine = kv.EmbeddingEngine(tables, store=kind.make())
        kv.optim.SGD(engine.table("x"), lr=1.0)
        opt = kv.optim.SGD(engine.table("y"), lr=1.0)
        out = engine({"x": torch.tensor([1, 2]), "y": torch.tensor([3, 4])})
        new = kv.optim.Adagrad(engine.table("x"), lr=1.0)
        (out["x"].sum() + out["y"].sum()).backward()
        new.step()
        opt.step()
        assert engine.table("y").vectors([3, 4]).tolist() == [[-1.0, -1.0]] * 2
        assert engine.table("y").stats()["dropped_gradients"] == 0

    def test_a_table_of_the_same_name_must_be_the_same(self, kind):
        rig = Rig(kind)
        rig.store.add_table(rig.spec)
        with pytest.raises(ValueError, match="'t'"):
            rig.store.add_table(kv.Table(7).spec("t", 0, 4))

    @pytest.mark.parametrize("init", also_slowly(INITS, QUICK_INITS))
    def test_rows_start_with_the_vectors_of_memory(self, kind, init):
        expected = memory()
        keys = np.array([*SPECIAL, *range(50)])
        uses = np.ones(len(keys), np.uint32)
        store = kind.make()
        for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            name = f"table {number}"
            spec = kv.Table((1, 7, 16)[number], dtype=dtype, init=INITS[init]).spec(name, 2**63 + 5, 4)
            rows = []
            for each in (store, expected):
                each.add_table(spec)
                rows.append(each.lookup({name: (keys, uses)}, LookupContext(True, 1))[name].vectors)
            assert np.array_equal(*rows), (dtype, np.abs(rows[0] - rows[1]).max())


def _walk(rig, source, length):
    for _ in range(source.randint(1, length)):
        action = source.choice(["train", "train", "look", "erase", "clear", "move"])
        keys = random_keys(source)
        if action == "train":
            rig.see(keys, np.array([source.randint(1, 3) for _ in keys], np.uint32))
            if len(rig.passes) == 2:
                rig.update(source)
        elif action == "look":
            before = rig.store.table("t").version
            assert rig.look(keys).vectors.tolist() == [rig.table.vector(key).tolist() for key in keys]
            assert rig.store.table("t").version == before
        elif action == "erase":
            rig.erase(keys)
        elif action == "clear":
            rig.store.table("t").clear()
            rig.table.rows.clear()
        else:
            parts = [rig.store.table("t").snapshot(part, len(keys)) for part in range(len(keys))]
            rig.store = rig.fresh()
            for part in reversed(parts):
                rig.store.table("t").load(part)
            rig.passes, rig.table.dropped = [], 0  # versions are of the other store
        rig.check()
