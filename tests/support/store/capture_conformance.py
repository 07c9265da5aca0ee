"""What a store must do for checkpoints: captures of one moment, deltas, and files that any store reads."""

import numpy as np
import pytest
import torch
from rows_conformance import Rig, assert_same_rows
from store_kinds import memory

import karvan as kv
from karvan.store import Rows


def read(capture, parts, table="t"):
    """All parts of a captured table, joined."""
    some = [capture.part(table, part) for part in range(parts)]
    return Rows(*map(np.concatenate, zip(*some, strict=True)))


def disturb(rig, source):
    """Changes of every kind."""
    rig.see([3, 4, 100])
    rig.update(source)
    rig.erase([1, 4])
    rig.see([4, 5])


class CaptureConformance:
    """Tests of captures and checkpoints, for a `StoreKind`."""

    def test_a_capture_is_of_one_moment(self, kind, source):
        rig = Rig(kind)
        rig.see(list(range(30)))
        rig.update(source)
        whole, version = rig.snapshot(), rig.store.table("t").version
        capture = rig.store.capture(["t"], {"t": 4})
        disturb(rig, source)
        assert capture.versions == {"t": version}
        assert_same_rows(read(capture, 4), whole)
        assert capture.erased("t").tolist() == []
        capture.close()
        rig.check()

    def test_deltas_bring_a_copy_up_to_date(self, kind, source):
        rig = Rig(kind)
        rig.see(list(range(30)))
        rig.update(source)
        capture = rig.store.capture(["t"], {"t": 2}, track=True)
        copy = rig.fresh()
        copy.table("t").load(read(capture, 2))
        for turn in range(3):
            versions = capture.versions
            capture.close()
            if turn == 1:  # nothing changes
                pass
            elif turn == 0:
                disturb(rig, source)
            else:
                rig.store.table("t").clear()
                rig.table.rows.clear()
                rig.passes = []
                rig.see([2, 7])
            whole = rig.snapshot()
            capture = rig.store.capture(["t"], {"t": 2}, versions, track=True)
            rig.see([3, 5, 200])  # not in this delta
            copy.table("t").erase(capture.erased("t"))
            rows = read(capture, 2)
            assert len(rows.keys) < 10
            copy.table("t").load(rows)
            assert_same_rows(copy.table("t").snapshot(), whole)
        capture.close()

    def test_a_delta_has_rows_whose_gradient_came_after_the_last_capture(self, kind, source):
        """The lookup was before it."""
        rig = Rig(kind)
        rig.see([1, 2, 3])
        capture = rig.store.capture(["t"], {"t": 1}, track=True)
        versions = capture.versions
        capture.close()
        rig.update(source)
        whole = rig.snapshot()
        capture = rig.store.capture(["t"], {"t": 1}, versions, track=True)
        assert_same_rows(read(capture, 1), whole)
        capture.close()

    def test_the_same_through_an_engine(self, kind):
        engine = kv.EmbeddingEngine({"f": kv.Table(2, "t", init=kv.init.Constant(0.0))}, store=kind.make())
        opt = kv.optim.SGD(engine, lr=1.0)
        out = engine({"f": torch.tensor([1, 2, 3])})["f"]
        capture = engine.store.capture(["t"], {"t": 1}, track=True)
        versions = capture.versions
        capture.close()
        out[:2].sum().backward()
        opt.step()
        capture = engine.store.capture(["t"], {"t": 1}, versions, track=True)
        rows = read(capture, 1)
        capture.close()
        found = dict(zip(rows.keys.tolist(), rows.vectors.tolist(), strict=True))
        assert found[1] == found[2] == [-1.0, -1.0]

    def test_parts_are_ranges_of_hashes(self, kind, source):
        rig = Rig(kind)
        rig.see(list(range(40)))
        for parts in (1, 2, 16):
            capture = rig.store.capture(["t"], {"t": parts})
            for part in range(parts):
                assert_same_rows(capture.part("t", part), rig.store.table("t").snapshot(part, parts))
            capture.close()

    def test_a_table_has_one_capture_whose_parts_are_read_in_order(self, kind, source):
        rig = Rig(kind)
        rig.see(list(range(8)))
        whole = rig.snapshot()
        capture = rig.store.capture(["t"], {"t": 2})
        with pytest.raises(ValueError, match="'t' is being captured already"):
            rig.store.capture(["t"], {"t": 2})
        with pytest.raises(ValueError, match="expected part 0 of 2, got 1"):
            capture.part("t", 1)
        rig.update(source)
        assert_same_rows(read(capture, 2), whole)
        with pytest.raises(ValueError, match="in order"):
            capture.part("t", 1)
        capture.close()
        capture.close()
        with pytest.raises(ValueError, match="closed"):
            capture.part("t", 0)
        with pytest.raises(ValueError, match="power of two, got 3"):
            rig.store.capture(["t"], {"t": 3})
        rig.store.capture(["t"], {"t": 1}).close()

    def test_checkpoints_go_from_any_store_to_any(self, kind, tmp_path):
        """From this kind to memory and back: rows, state, counts, steps and the filter's counters."""
        engines = [_engine(store) for store in (kind.make(), memory(), kind.make())]
        _train(*engines[0], seed=0)
        for number, (source, target) in enumerate(((0, 1), (1, 2))):
            kv.checkpoint.save(tmp_path / str(number), {}, engines[source][0])
            _train(*engines[target], seed=9)  # what it holds is replaced
            kv.checkpoint.find(tmp_path / str(number)).load(engines[target][0])
            _assert_same(engines[source][0], engines[target][0])
            _train(*engines[target], seed=1)

    def test_deltas_in_a_folder_are_read_by_memory(self, kind, tmp_path):
        (engine, opt), (other, _) = (_engine(store) for store in (kind.make(), memory()))
        saves = kv.checkpoint.Checkpoints(tmp_path, full_every=4)
        for step in range(3):
            _train(engine, opt, seed=step)
            pending = saves.save(step + 1, {}, engine)
            if step == 1:
                engine.table("t").evict_keys([1, 2, 3])
            pending.wait()
        kv.checkpoint.find(tmp_path).load(other)
        _assert_same(engine, other)


def _engine(store):
    few = kv.admission.MinCount(2, slots=64)
    engine = kv.EmbeddingEngine(
        {"f": kv.Table(5, "t", admit=few), "h": kv.Table(3, dtype=torch.float16)}, store=store
    )
    return engine, kv.optim.Adam(engine, lr=0.1)


def _train(engine, opt, seed):
    keys = torch.randint(0, 20, (30,), generator=torch.Generator().manual_seed(seed))
    out = engine({"f": keys, "h": keys % 7})
    (out["f"].square().sum() + out["h"].sum()).backward()
    opt.step()


def _assert_same(one, other):
    for name in ("t", "h"):
        assert_same_rows(one.table(name).snapshot(), other.table(name).snapshot())
        mine, theirs = one.store.table(name).extra(), other.store.table(name).extra()
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
