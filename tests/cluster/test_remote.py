"""The remote store: what parameter servers hold is what memory would, and lookups stay within the bound."""

import contextlib
import gc

import numpy as np
import pytest
import ranks_helpers
import torch
from cluster_helpers import serving
from few_examples import few_examples
from hypothesis import given
from hypothesis import strategies as st
from sharded_programs import FEATURES, global_batch, part_of, train, values_of

import karvan as kv
from karvan import distributed
from karvan.discovery.registry import Registry
from karvan.job.roles import Role
from karvan.wire import RefusedError

SCENARIOS = {
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "momentum"},
    "adagrad": {},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "ftrl": {"optimizer": "ftrl"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "admission": {"admit": 2},
    "accumulation": {"passes": 3},
    "a feature without gradients": {"unused": ["sqrtn", "mean"]},
    "prepared": {"prepare": True},
    "sum over trainers": {"grad_reduce": "sum"},
}


def assert_same(one, other):
    for name, rows in other["tables"].items():
        for received, expected in zip(one["tables"][name], rows, strict=True):
            np.testing.assert_array_equal(received, expected)
    for name, output in other["outputs"].items():
        assert torch.equal(one["outputs"][name], output)
    assert torch.equal(one["some"], other["some"])


def joined(results):
    """The rows of all trainers, by key."""
    tables = {}
    for name in results[0]["tables"]:
        columns = [
            np.concatenate(column) for column in zip(*(one["tables"][name] for one in results), strict=True)
        ]
        order = np.argsort(columns[0])
        tables[name] = [column[order] for column in columns]
    return tables


@pytest.mark.parametrize(
    ("name", "servers"), [*((name, 2) for name in SCENARIOS), ("adam", 1), ("adam", 4), ("admission", 4)]
)
def test_synchronous_servers_give_the_bits_of_memory(name, servers):
    expected = train(shared=False, **SCENARIOS[name])
    with serving(servers) as addresses:
        assert_same(train(servers=addresses, **SCENARIOS[name]), expected)


def test_features_that_read_alone_and_lists_of_lists_give_the_bits_of_memory():
    def train():
        engine = kv.EmbeddingEngine(
            {"item": kv.Table(3), "seen": kv.Table(3, name="item", read_only=True), "new": kv.Table(2)}
        )
        optimizer = kv.optim.Adagrad(engine, lr=0.1)
        outputs = []
        for step in range(4):
            ids = torch.arange(12).reshape(2, 3, 2) + 3 * step
            batch = {"item": ids, "seen": torch.tensor([[3, 400], [9, 8]]), "new": torch.tensor([step, 1])}
            if step % 2:
                assert engine.prepare(batch, training=True)
            made = engine(batch)
            outputs += [made["item"].detach(), made["seen"]]
            (made["item"].sin().sum() + made["new"].sum()).backward()
            optimizer.step()
        return outputs, engine.table("item").snapshot()

    kv.connect("memory")
    expected, rows = train()
    with serving(2) as addresses:
        kv.connect("remote", servers=addresses)
        made, found = train()
        distributed.disconnect()
    assert all(map(torch.equal, made, expected))
    order = np.argsort(rows.keys), np.argsort(found.keys)
    for one, other in zip(rows, found, strict=True):
        np.testing.assert_array_equal(one[order[0]], other[order[1]])


@few_examples(6)
@given(data=st.data())
def test_random_batches_give_the_bits_of_memory(data):
    keys = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)
    row = st.lists(keys, max_size=3)
    rows = data.draw(st.integers(1, 4))
    batch = st.fixed_dictionaries({name: st.lists(row, min_size=rows, max_size=rows) for name in FEATURES})
    drawn = data.draw(st.lists(batch, min_size=1, max_size=4))
    batches = [{name: [np.array(r, np.int64) for r in each[name]] for name in each} for each in drawn]
    expected = train(shared=False, steps=len(batches), batches=batches)
    with serving(data.draw(st.sampled_from([1, 3]))) as addresses:
        assert_same(train(servers=addresses, steps=len(batches), batches=batches), expected)


@pytest.mark.parametrize(
    "name",
    [
        "adagrad",
        pytest.param("sum over trainers", marks=pytest.mark.slow),
        pytest.param("a feature without gradients", marks=pytest.mark.slow),
    ],
)
def test_synchronous_trainers_give_the_bits_of_sharded_ones(name):
    expected = ranks_helpers.run(2, "sharded_programs:train", **SCENARIOS[name])
    with serving(3) as addresses:
        received = ranks_helpers.run(2, "sharded_programs:train", servers=addresses, **SCENARIOS[name])
    for table, columns in joined(expected).items():
        for one, other in zip(joined(received)[table], columns, strict=True):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(received, expected, strict=True):
        for feature, output in other["outputs"].items():
            assert torch.equal(one["outputs"][feature], output)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_vectors_may_travel_in_two_bytes(wire):
    expected = train(shared=False)
    with serving(2) as addresses:
        received = train(servers=addresses, wire=wire)
    for name, output in expected["outputs"].items():
        torch.testing.assert_close(received["outputs"][name], output, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_no_more_batches_are_out_than_the_bound_allows(bound):
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=bound)
        engine = kv.EmbeddingEngine({name: make() for name, make in FEATURES.items()})
        sparse = kv.optim.SGD(engine, lr=0.1)
        batches = [part_of(global_batch(step, 6), 0, 1) for step in range(20)]
        ahead = iter(batches)
        for _, batch in zip(range(7), ahead, strict=False):
            engine.prepare(batch, training=True)
        for batch in batches:
            out = engine(batch)
            sum(values_of(o).sum() for o in out.values()).backward()
            sparse.step()
            if (following := next(ahead, None)) is not None:
                engine.prepare(following, training=True)
        assert 1 <= engine.store.window.most <= bound
        assert engine.store.window.lookups == 20


def test_batches_that_are_never_used_do_not_stand_in_the_way():
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=2)
        engine = kv.EmbeddingEngine({"user": kv.Table(4)})
        sparse = kv.optim.SGD(engine, lr=0.1)
        for number in range(6):
            engine.prepare({"user": torch.tensor([number])}, training=True)
        engine.forget_prepared()
        gc.collect()
        for _ in range(5):
            engine({"user": torch.tensor([1])})["user"]  # no gradient comes of it
        engine({"user": torch.tensor([1])})["user"].sum().backward()
        sparse.step()
        assert engine.table("user").rows >= 1


def test_an_evaluation_changes_nothing_and_unknown_keys_give_zeros():
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=4)
        engine = kv.EmbeddingEngine({"user": kv.Table(4)}).eval()
        assert not engine({"user": torch.arange(5)})["user"].any()
        assert engine.table("user").rows == 0


def test_a_table_that_is_not_finite_is_left_alone_and_counted():
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=3)
        engine = kv.EmbeddingEngine({"good": kv.Table(2), "bad": kv.Table(2)})
        sparse = kv.optim.SGD(engine, lr=0.5)
        batch = {"good": torch.arange(8), "bad": torch.arange(8)}
        out = engine(batch)
        before = {name: out[name].detach().clone() for name in out}
        (out["good"].sum() + out["bad"].sum() * float("nan")).backward()
        sparse.step()
        after = {name: engine.table(name).vectors(torch.arange(8)) for name in batch}
        torch.testing.assert_close(after["good"], before["good"] - 0.5)
        assert torch.equal(after["bad"], before["bad"])
        assert engine.table("bad").stats()["skipped_updates"] == 1
        assert engine.table("good").stats()["skipped_updates"] == 0


def test_rows_are_looked_into_and_maintained_like_those_in_memory():
    def use():
        engine = kv.EmbeddingEngine({"user": kv.Table(3, evict=kv.eviction.Age(5))}, seed=1)
        sparse = kv.optim.Adam(engine, lr=0.1)
        for step in range(8):
            engine({"user": torch.arange(step, step + 4)})["user"].sum().backward()
            sparse.step()
        table = engine.table("user")
        said = [table.evict(), table.evict_keys([9, 77]), table.rows, sorted(table.keys().tolist())]
        rows = table.snapshot()
        table.clear()
        said.append(table.rows)
        table.load(rows)
        return said, table.snapshot(), table.vectors([5, 6, 100])

    expected = use()
    with serving(3) as addresses:
        distributed.connect("remote", servers=addresses)
        received = use()
    assert received[0] == expected[0]
    for one, other in zip(received[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert torch.equal(received[2], expected[2])


def test_who_asks_for_the_wrong_server_is_refused():
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses[::-1])
        with pytest.raises(RefusedError, match="expected to be asked for as server 1 of 2, got 0 of 2"):
            kv.EmbeddingEngine({"user": kv.Table(4)})


def test_a_table_of_another_shape_is_refused():
    with serving(1) as addresses:
        distributed.connect("remote", servers=addresses)
        kv.EmbeddingEngine({"user": kv.Table(4)})
        with pytest.raises(ValueError, match="Table 'user' is in the store already"):
            kv.EmbeddingEngine({"user": kv.Table(8)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "remote"}, "expects servers"),
        ({"kind": "remote", "servers": ["nowhere"]}, "host:port"),
        ({"kind": "remote", "servers": ["a:1"], "staleness": 0}, "at least 1"),
        ({"kind": "memory", "servers": ["a:1"]}, 'for connect\\("remote"\\)'),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        distributed.connect(options.pop("kind"), **options)


def test_a_launched_job_says_what_travels_and_how_stale(monkeypatch):
    monkeypatch.setenv("KARVAN_WIRE", "bfloat16")
    monkeypatch.setenv("KARVAN_MODE", "hybrid")
    monkeypatch.setenv("KARVAN_STALENESS", "6")
    with serving(1) as addresses:
        settings = distributed.connect("remote", servers=addresses).settings
        assert (settings.wire, settings.mode.name, settings.staleness) == ("bfloat16", "hybrid", 6)
        assert distributed.connect("remote", servers=addresses, wire="float16").settings.wire == "float16"


def test_a_trainer_of_a_launched_job_is_known_to_its_registry(monkeypatch):
    with serving(1) as addresses, contextlib.closing(Registry()) as registry:
        monkeypatch.setenv("KARVAN_REGISTRY", registry.address)
        distributed.connect("remote", servers=addresses)
        assert registry.members() == []  # it is nobody's trainer
        monkeypatch.setenv("KARVAN_ROLE", "trainer")
        monkeypatch.setenv("KARVAN_INDEX", "3")
        distributed.connect("remote", servers=addresses)
        assert registry.healthy(Role.TRAINER, 3) is True
        distributed.disconnect()
        assert registry.healthy(Role.TRAINER, 3) is None
