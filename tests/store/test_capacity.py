"""The capacity of a store: rows over all tables, of which those used least recently leave."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan import _native, distributed
from karvan.store import LookupContext, MemoryStore

TABLES = ("b", "a", "c")  # ties are decided by name, not by the order in which tables were added


def hash_of(key):
    made = np.empty(1, np.uint64)
    _native.mix(np.array([key], np.int64), made)
    return int(made[0])


class SlowStore:
    """The definition: all rows in one list, sorted by last use, uses, hash and name."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.rows = {}  # (table, key) → [last use, uses]
        self.evicted = dict.fromkeys(TABLES, 0)

    def lookup(self, keys, step):
        for table, uses in keys.items():
            for key, count in uses.items():
                row = self.rows.setdefault((table, key), [0, 0])
                row[0], row[1] = step, row[1] + count
        order = sorted(self.rows, key=lambda row: (*self.rows[row], hash_of(row[1]), row[0]))
        for row in order[: max(0, len(order) - self.capacity)]:
            del self.rows[row]
            self.evicted[row[0]] += 1


BATCHES = st.lists(
    st.dictionaries(
        st.sampled_from(TABLES),
        st.dictionaries(st.integers(-4, 8), st.integers(1, 3), min_size=1),
        min_size=1,
    ),
    max_size=12,
)


@given(batches=BATCHES, capacity=st.integers(1, 12), repeat=st.integers(1, 3))
def test_rows_leave_in_the_order_of_their_last_use_whatever_their_table(batches, capacity, repeat):
    store, slow = MemoryStore(capacity=capacity), SlowStore(capacity)
    for number, table in enumerate(TABLES):
        store.add_table(kv.Table(2 + number).spec(table, 0, 1 << number))
    for number, batch in enumerate(batches):
        step = number // repeat  # several lookups of one step, as of several trainers
        arrays = {
            table: (np.array(list(uses), np.int64), np.array(list(uses.values()), np.uint32))
            for table, uses in batch.items()
        }
        for training in (False, True):  # one that is not for training changes nothing
            store.lookup(arrays, LookupContext(training, step))
        slow.lookup(batch, step)
        found = {}
        for table in TABLES:
            rows = store.table(table).snapshot()
            for key, uses, last in zip(rows.keys, rows.counts, rows.last_steps, strict=True):
                found[table, int(key)] = [int(last), int(uses)]
            assert store.table(table).stats()["evicted"] == slow.evicted[table]
        assert found == slow.rows


def train(store, steps=30):
    tables = {"user": kv.Table(4), "item": kv.Table(2, evict=kv.eviction.LRU(capacity=15))}
    engine = kv.EmbeddingEngine(tables, seed=1, store=store)
    optimizer = kv.optim.Adagrad(engine, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = {name: torch.randint(0, 40, (8,), generator=generator) for name in tables}
        out = engine(batch)
        (out["user"].sum() + out["item"].square().sum()).backward()
        optimizer.step()
        assert sum(engine.table(name).rows for name in tables) <= 20
    return engine


def test_an_engine_trains_within_a_capacity():
    store = MemoryStore(capacity=20)
    engine = train(store)
    rows = {name: engine.table(name).rows for name in ("user", "item")}
    assert sum(rows.values()) == 20
    assert min(rows.values()) > 0
    assert rows["item"] <= 15  # the policy of the table counts as well
    assert store.table("user").stats()["dropped_gradients"] == 0
    narrow = MemoryStore(capacity=3)  # less than a batch has
    train(narrow)
    assert narrow.table("user").stats()["dropped_gradients"] > 0


def test_a_lookup_with_more_rows_than_the_capacity_still_has_all_of_its_vectors():
    store = MemoryStore(capacity=3)
    store.add_table(kv.Table(2).spec("t", 0, 1))
    keys = np.arange(10, dtype=np.int64), np.ones(10, np.uint32)
    found = store.lookup({"t": keys}, LookupContext(True, 1))["t"]
    assert found.vectors.shape == (10, 2)
    assert len(np.unique(found.vectors[:, 0])) == 10
    assert store.table("t").stats()["rows"] == 3


def test_a_connection_in_memory_has_a_capacity():
    expected = train(MemoryStore(capacity=20))
    try:
        kv.connect("memory", capacity=20)
        received = train(None)
    finally:
        distributed.disconnect()
    for name in ("user", "item"):
        keys = [np.sort(each.store.table(name).snapshot().keys) for each in (received, expected)]
        assert np.array_equal(*keys)
    unlimited = kv.EmbeddingEngine({"user": kv.Table(4)})
    unlimited({"user": torch.arange(30)})
    assert unlimited.table("user").rows == 30


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 0}, "capacity of at least 1 row, got 0"),
        ({"kind": "remote", "capacity": 5}, r'got connect\("remote"\): .*roles\.parameter_servers\.capacity'),
        ({"kind": "cuda", "capacity": 5}, "use device_memory for a GPU"),
        ({"capacity": 5, "timeout": 3.0}, 'timeout and transport are for connect\\("sharded"\\)'),
    ],
)
def test_a_capacity_that_means_nothing_is_an_error(options, text):
    with pytest.raises(ValueError, match=text):
        kv.connect(**options)
    assert distributed.current().settings.capacity is None
