"""What tables on a device must do beyond other stores: the same bits every time, growth in small steps, and
no read of memory that nobody has written.
"""

import random

import numpy as np
import pytest
import reference as ref
import torch
from engine_pair import tensor_of
from rows_conformance import Rig, assert_same_rows
from store_kinds import StoreKind, also_slowly, memory
from training_conformance import SHARED, pair_of, random_batch

import karvan as kv
from karvan.store import LookupContext
from karvan.store.cuda import arena, contents, table_memory
from karvan.store.program import FeatureTensors, OutputLayout


def trained(kind, optimizer="adam", steps=2, move_at=None):
    """An engine after some steps, whose rows have perhaps moved to another store in the middle."""

    def fresh():
        engine = kv.EmbeddingEngine(
            {
                "a": kv.Table(3, "one"),
                "b": kv.Table(3, "one", "mean"),
                "c": kv.Table(3, "two", dtype=torch.bfloat16),
            },
            seed=3,
            store=kind.make(),
        )
        cls, options = ref.OPTIMIZERS[optimizer]
        return engine, getattr(kv.optim, cls)(engine, **options)

    engine, opt = fresh()
    generator = torch.Generator().manual_seed(5)
    outputs = []
    for step in range(steps):
        if step == move_at:
            old, saved = engine, opt.state_dict()
            engine, opt = fresh()
            engine.step = old.step
            for name in ("one", "two"):
                rows = old.table(name).snapshot()
                back = type(rows)(*(np.ascontiguousarray(part[::-1]) for part in rows))
                engine.table(name).load(back)
            opt.load_state_dict(saved)
        ids = torch.randint(0, 3 + 5 * step, (3, 100), generator=generator)  # runs longer than a piece
        out = engine({"a": ids[0], "b": ids[1].view(50, 2).repeat(2, 1), "c": ids[2]})
        factors = [torch.randn(each.shape, generator=generator).to(each.device) for each in out.values()]
        sum((each * factor).sum() for each, factor in zip(out.values(), factors, strict=True)).backward()
        opt.step()
        outputs += [each.detach().cpu() for each in out.values()]
    return engine, outputs


def assert_same_bits(one, other):
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one[1], other[1], strict=True))
    for name in ("one", "two"):
        assert_same_rows(one[0].table(name).snapshot(), other[0].table(name).snapshot())


class DeviceConformance:
    """Tests of `CudaStore`, for a `StoreKind` of it."""

    def test_the_same_training_gives_the_same_bits(self, kind):
        first = trained(kind)
        assert_same_bits(first, trained(kind))
        assert_same_bits(first, trained(kind, move_at=1))  # rows have other numbers then

    def test_sizes_of_all_tables_are_learned_at_once(self, kind, monkeypatch):
        engine, _ = trained(kind)
        expected = {table.name: table.stats()["rows"] for table in engine.tables()}
        waits = []
        real = table_memory.TableMemory.learn_now
        monkeypatch.setattr(
            table_memory.TableMemory, "learn_now", lambda memory: waits.append(1) or real(memory)
        )
        assert engine.sizes() == expected
        assert min(expected.values()) > 0
        assert len(waits) == 1

    def test_sizes_are_those_after_rows_beyond_a_capacity_have_gone(self, kind):
        tables = {"a": kv.Table(2), "b": kv.Table(2, evict=kv.eviction.LRU(5))}
        engine = kv.EmbeddingEngine(tables, store=kind.make())
        kv.optim.SGD(engine, lr=0.1)
        engine(dict.fromkeys(tables, torch.arange(9)))
        assert engine.sizes() == {"a": 9, "b": 5}

    @pytest.mark.parametrize("optimizer", also_slowly(["sgd-momentum", "adagrad", "adam"], ("adagrad",)))
    def test_rows_agree_with_those_of_memory(self, kind, optimizer):
        """16-bit vectors within one unit, as sums have another order."""
        here, _ = trained(kind, optimizer)
        there, _ = trained(StoreKind("memory", memory), optimizer)
        for name, unit in (("one", 0.0), ("two", torch.finfo(torch.bfloat16).eps)):
            mine, theirs = (engine.table(name).snapshot() for engine in (here, there))
            assert np.array_equal(mine.keys, theirs.keys)
            near = 2e-6 + (3e-5 + unit) * np.abs(theirs.vectors)
            assert (np.abs(mine.vectors - theirs.vectors) <= near).all()

    def test_training_agrees_with_that_in_memory(self, kind):
        """A small network on a table of each store, over some steps of the same data."""
        steps = kind.few(20, 12)
        losses = [_fit(kind.make(), steps), _fit(memory(), steps)]
        np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-4)
        assert losses[0][0][-1] < 0.8 * losses[0][0][0]
        np.testing.assert_allclose(losses[0][1], losses[1][1], rtol=1e-3, atol=1e-5)

    def test_growth_in_small_steps(self, kind, source, monkeypatch):
        """Rows are found, inserted, erased and listed while keys are in two indexes, and in many chunks."""
        monkeypatch.setattr(table_memory, "_MOVED", 8)
        monkeypatch.setattr(arena, "_CHUNK_BYTES", 1024)
        monkeypatch.setattr(table_memory, "_AHEAD", 1)  # so that the index does not begin large
        rig = Rig(kind)
        table = rig.store.memory.tables["t"]
        known, grew = 0, 0
        for target in (140, 290, 600)[: kind.few(3, 2)]:
            rig.see(list(range(known, target)))
            known = target
            for turn in range(15):
                rig.see([known, known + 1, *source.sample(range(known), 4)])
                known += 2
                rig.passes = rig.passes[-2:]
                grew += table.index.grows
                if turn % 4 == 1:
                    keys = source.sample(range(known), 20)
                    assert rig.look(keys).vectors.tolist() == [rig.table.vector(key).tolist() for key in keys]
                if turn == 8:
                    rig.update(source)
            rig.erase(source.sample(range(known), 10))
        assert grew > 8
        assert rig.store.table("t").stats()["moved"] > 256
        rig.check()

    @pytest.mark.slow
    def test_many_chunks_of_erased_rows_are_used_again(self, kind, source, monkeypatch):
        monkeypatch.setattr(arena, "_CHUNK_BYTES", 1024)
        rig = Rig(kind)
        for turn in range(kind.few(20, 6)):
            rig.see(list(range(turn * 100, turn * 100 + 150)))
            rig.passes = []
            rig.erase(list(range(turn * 100 - 50, turn * 100 + 70)))
        rig.check()
        (used,) = rig.store.memory._arenas.values()
        assert used.capacity < 600  # not all rows that there ever were

    def test_erasures_that_a_table_has_forgotten_are_not_passed_over(self, kind, monkeypatch):
        """A delta that would lack some is refused."""
        monkeypatch.setattr(contents, "_LOGGED", 4)
        rig = Rig(kind)
        rig.see(list(range(30)))
        capture = rig.store.capture(["t"], {"t": 1}, track=True)
        capture.close()
        for first in range(0, 30, 3):
            rig.erase(list(range(first, first + 3)))
        with pytest.raises(ValueError, match="'t'"):
            rig.store.capture(["t"], {"t": 1}, capture.versions, track=True)
        with pytest.raises(ValueError, match="'t' remembers evictions since"):
            rig.store.table("t").evicted_since(0)

    def test_wrong_offsets_that_only_the_device_sees_are_reported_some_steps_later(self, kind):
        engine = kv.EmbeddingEngine({"a": kv.Table(3, combiner="sum")}, store=kind.make())
        store, program = engine.store, engine.program
        ids = torch.arange(6, device=store.device)

        def batch(offsets):
            layout = OutputLayout(3, 6, 1, torch.tensor([0, 2, 4, 6]))
            made = store.prepare(program, (FeatureTensors(ids, None, layout),))
            made.ids[0] = made.ids[0]._replace(offsets=torch.tensor(offsets, device=store.device))
            return made

        def look_up(steps, offsets):
            for step in steps:
                store.forward(program, batch(offsets), LookupContext(True, step))
                if store.device.type == "cuda":
                    torch.cuda.synchronize()

        look_up([1], [0, 1, 1, 6])
        look_up([2], [0, 5, 3, 6])
        with pytest.raises(ValueError, match="wrong offsets, found on the GPU"):
            look_up(range(3, 9), [0, 1, 1, 6])
        look_up([9], [0, 1, 1, 6])  # reported once

    def test_nothing_depends_on_memory_that_was_never_written(self, kind, poison):
        """All memory that torch allocates begins as NaN or as large numbers."""
        poison()
        pair, batches = pair_of(kind, optimizer="adam"), []
        source = random.Random(11)
        for seed in range(2):
            batches.append(random_batch(source))
            poison()
            pair.train(batches[-1], seed)
        poison()
        pair.engine.table("one").evict_keys([1, 2])
        pair.tables["one"].evict([1, 2])
        poison()
        lookups, outputs = pair.forward(batches[0])
        assert all(torch.isfinite(tensor_of(outputs[name])).all() for name in SHARED)
        pair.update(pair.backward(lookups, outputs, seed=3))
        pair.check()
        for name in pair.tables:
            rows = pair.engine.table(name).snapshot()
            assert np.isfinite(rows.vectors).all()
            assert np.isfinite(rows.state).all()


def _fit(store, steps):
    torch.manual_seed(0)
    tables = {"user": kv.Table(4), "item": kv.Table(4, combiner="mean")}
    engine = kv.EmbeddingEngine(tables, seed=1, store=store)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(store.device)
    sparse, dense = kv.optim.Adagrad(engine, lr=0.3), torch.optim.Adam(net.parameters(), lr=0.03)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        user = torch.randint(0, 12, (32,), generator=generator)
        item = torch.randint(0, 12, (32, 2), generator=generator)
        label = (user + item[:, 0] < 11).float().to(store.device)
        out = engine({"user": user, "item": item})
        logit = net(torch.cat([out["user"], out["item"]], 1))[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        sparse.step()
        dense.step()
        dense.zero_grad()
        losses.append(float(loss))
    return losses, engine.table("user").vectors(torch.arange(12)).numpy()
