"""What a store must do about admission and eviction: the same rows as memory, row by row."""

import numpy as np
import pytest
import torch
from rows_conformance import assert_same_rows
from store_kinds import also_slowly, memory

import karvan as kv

ADMISSIONS = {
    "always": kv.admission.Always(),
    "half": kv.admission.Probability(0.5),
    "half each time": kv.admission.Probability(0.5, each=True),
    "nearly none": kv.admission.Probability(1e-3),
    "twice": kv.admission.MinCount(2),
    "five times": kv.admission.MinCount(5),
    "read only": kv.admission.ReadOnly(),
}
EVICTIONS = {
    "lru 1": kv.eviction.LRU(1),
    "lru 9": kv.eviction.LRU(9),
    "lfu 1": kv.eviction.LFU(1),
    "lfu 9": kv.eviction.LFU(9),
    "age": kv.eviction.Age(2, every=1),
    "age 0": kv.eviction.Age(0, every=1),
    "age now and then": kv.eviction.Age(1, every=3),
    "norm": kv.eviction.Norm(0.45, every=2),
}
COUNTED = ("rows", "inserted", "evicted", "rejected")


def _capture(engine, handle, keys):
    capture = engine.store.capture(["t"], {"t": 1})
    rows = capture.part("t", 0)
    capture.close()
    return rows.keys.tolist()


def _evaluate(engine, handle, keys):
    with torch.no_grad():
        out = engine.eval()({"f": keys, "g": keys})["f"].tolist()
    engine.train()
    return out


LOOKS = (  # at a table, after a lookup
    lambda engine, handle, keys: [handle.stats()[name] for name in COUNTED],
    lambda engine, handle, keys: handle.snapshot().keys.tolist(),
    lambda engine, handle, keys: handle.vectors(keys).tolist(),
    lambda engine, handle, keys: sorted(handle.evicted_since(handle.version - 1).tolist()),
    _capture,
    _evaluate,
)


class Twins:
    """The same program on a store and in memory."""

    def __init__(self, kind, **options):
        self.kind = kind
        self.engines = [
            kv.EmbeddingEngine(
                {"f": kv.Table(4, "t", **options), "g": kv.Table(4, "t", "mean", **options)}, store=s
            )
            for s in (kind.make(), memory())
        ]
        self.optimizers = [kv.optim.SGD(engine, lr=0.5) for engine in self.engines]
        self.handles = [engine.table("t") for engine in self.engines]

    def train(self, f, g):
        """A step, whose gradients are halves of whole numbers: all sums are exact."""
        versions = [handle.version for handle in self.handles]
        made = []
        for engine, opt in zip(self.engines, self.optimizers, strict=True):
            out = engine({"f": torch.tensor(f), "g": kv.Ragged.from_lists(g)})
            made.append([each.detach().cpu() for each in (out["f"], out["g"])])
            (out["f"].sum() + out["g"].sum() * 0.5).backward()
            opt.step()
        torch.testing.assert_close(*made)
        gone = [h.evicted_since(v).tolist() for h, v in zip(self.handles, versions, strict=True)]
        assert sorted(gone[0]) == sorted(gone[1])
        self.check()

    def check(self):
        mine, theirs = (handle.snapshot() for handle in self.handles)
        np.testing.assert_allclose(mine.vectors, theirs.vectors, rtol=1e-6, atol=1e-7)
        assert_same_rows(mine._replace(vectors=theirs.vectors), theirs)
        counts = [[handle.stats()[name] for name in COUNTED] for handle in self.handles]
        assert counts[0] == counts[1]
        if not self.kind.drops_rejected:
            dropped = [handle.stats()["dropped_gradients"] for handle in self.handles]
            assert dropped[0] == dropped[1]

    def check_extra(self):
        mine, theirs = (engine.store.table("t").extra() for engine in self.engines)
        assert set(mine) == set(theirs)
        for name, expected in theirs.items():
            assert np.array_equal(mine[name], expected), name

    def walk(self, source, steps, most=40, before=lambda step: None):
        for step in range(steps):
            before(step)
            samples = source.randint(1, 12)
            f = [min(source.randint(0, most), source.randint(0, most)) for _ in range(samples)]
            g = [[source.randint(0, most) for _ in range(source.randint(1, 2))] for _ in range(samples)]
            self.train(f, g)


class PolicyConformance:
    """Tests of admission and eviction, for a `StoreKind`."""

    @pytest.mark.parametrize(
        "admit", also_slowly(ADMISSIONS, ("half", "half each time", "twice", "read only"))
    )
    def test_admission(self, kind, admit, source):
        twins = Twins(kind, admit=ADMISSIONS[admit])
        twins.walk(source, kind.few(12, 4), most=12)
        twins.check_extra()

    def test_counters_of_the_filter_stop_at_255_and_move(self, kind):
        twins = Twins(kind, admit=kv.admission.MinCount(250))
        for f in ([1] * 200, [2] * 249, [3] * 300, [1] * 49, [1]):
            twins.train(f, [[7]] * len(f))
        twins.check_extra()
        assert twins.handles[0].rows > 0
        other = Twins(kind, admit=kv.admission.MinCount(250))
        for engine in other.engines:
            engine.store.table("t").load_extra(twins.engines[1].store.table("t").extra())
        other.check_extra()
        other.train([2, 2], [[1], [9]])
        other.check_extra()
        for handle in other.handles:
            handle.clear()
        other.check_extra()

    def test_keys_that_are_not_admitted_have_no_gradient(self, kind):
        start = kv.init.Constant(0.0)
        engine = kv.EmbeddingEngine(
            {"f": kv.Table(2, admit=kv.admission.MinCount(2), init=start)}, store=kind.make()
        )
        opt = kv.optim.SGD(engine, lr=1.0)
        for ids in ([1, 2, 2], [1]):
            out = engine({"f": torch.tensor(ids)})["f"]
            out.sum().backward()
            opt.step()
        assert sorted(engine.table("f").keys().tolist()) == [1, 2]
        assert engine.table("f").vectors([1, 2]).tolist() == [[-1.0, -1.0], [-2.0, -2.0]]

    def test_tables_of_one_layout_that_admit_differently(self, kind):
        """In one lookup: all, some and no new keys get rows."""
        admits = {
            "all": kv.admission.Always(),
            "two": kv.admission.MinCount(2),
            "none": kv.admission.ReadOnly(),
        }
        engine = kv.EmbeddingEngine({n: kv.Table(2, admit=a) for n, a in admits.items()}, store=kind.make())
        engine(dict.fromkeys(admits, torch.tensor([1, 2, 2, -1])))
        assert {name: sorted(engine.table(name).keys().tolist()) for name in admits} == {
            "all": [-1, 1, 2],
            "two": [2],
            "none": [],
        }
        assert [engine.table(name).stats()["rejected"] for name in admits] == [0, 2, 3]

    @pytest.mark.parametrize("evict", also_slowly(EVICTIONS, ("lru 1", "lfu 9", "age 0", "norm")))
    def test_eviction(self, kind, evict, source):
        """Also of rows that the same lookup has inserted, whose gradients are dropped then."""
        twins = Twins(kind, evict=EVICTIONS[evict], init=kv.init.Uniform(-0.4, 0.4))
        twins.walk(source, kind.few(20, 5))
        for engine, handle in zip(twins.engines, twins.handles, strict=True):
            engine.state.step += 5
            handle.evict()
        twins.check()

    def test_a_lookup_alone_evicts_before_anybody_looks(self, kind):
        twins = Twins(kind, evict=kv.eviction.LRU(3))
        for number, look in enumerate(LOOKS):
            found = []
            for engine, handle in zip(twins.engines, twins.handles, strict=True):
                keys = torch.arange(7 * number, 7 * number + 9)
                engine({"f": keys, "g": keys})
                found.append(look(engine, handle, keys))
            assert found[0] == found[1], number
        twins.check()

    def test_rows_not_used_for_some_time(self, kind, source):
        now = [1000.0]
        twins = Twins(kind, evict=kv.eviction.TTL(10.0, every=2, clock=lambda: now[0]))

        def jump(step):
            now[0] += source.choice([0.05, 1.0, 4.0, 11.0, -3.0])

        twins.walk(source, kind.few(25, 6), before=jump)
        twins.check_extra()
        now[0] += 9.0
        assert twins.handles[0].evict() == twins.handles[1].evict()
        twins.check()
        moved = Twins(kind, evict=kv.eviction.TTL(10.0, every=2, clock=lambda: now[0]))
        for new, engine, handle in zip(moved.engines, twins.engines, twins.handles, strict=True):
            new.table("t").load(handle.snapshot())
            new.store.table("t").load_extra(engine.store.table("t").extra())
            new.step = engine.step
        now[0] += 2.0
        moved.walk(source, 2)
        moved.check_extra()

    def test_a_full_table_reuses_its_memory(self, kind, source):
        twins = Twins(kind, evict=kv.eviction.LRU(20))
        for step in range(kind.few(20, 6)):
            keys = list(range(step * 60, step * 60 + 60))
            twins.train(keys, [[key] for key in keys])
        assert twins.handles[0].rows == 20
