"""`MemoryStore` and `Owner` by keys, against dicts: lookups, updates, erased rows, snapshots and loads."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import SGD, ReferenceTable, check_table, mix
from test_message_layout import as_message

import karvan as kv
from karvan.store import LookupContext, MemoryStore, Push, Rows, Rule
from karvan.store.row_owner import Owner

DIM = 2
LR = 0.5  # and gradients in eighths: all sums are exact, in any order
SPEC = kv.Table(DIM).spec("t", 0, 4)
KEYS = st.lists(st.integers(-6, 6), unique=True, min_size=1, max_size=6)


def rule():
    made = Rule("sgd")
    made.lr = LR
    return made


def new_store():
    store = MemoryStore()
    store.add_table(SPEC)
    return store


def new_table():
    def initial(key):
        return torch.from_numpy(SPEC.initial_vectors(np.array([key]))[0])

    return ReferenceTable(DIM, SGD(lr=LR), initial)


class Handle:
    """What `check_table` asks of a table."""

    def __init__(self, store):
        self.store = store

    def snapshot(self):
        return self.store.table("t").snapshot()

    @property
    def rows(self):
        return self.store.table("t").stats()["rows"]


def gradient_of(rng):
    return (rng.integers(-8, 9, DIM) / 8).astype(np.float32)


ACTION = st.one_of(
    st.tuples(st.just("train"), KEYS),
    st.tuples(st.just("train"), KEYS),
    st.tuples(st.just("look"), KEYS),
    st.tuples(st.just("erase"), KEYS),
    st.tuples(st.just("clear"), KEYS),
    st.tuples(st.just("move"), KEYS),
)


@given(st.lists(ACTION, max_size=25), st.integers(0, 2**32 - 1))
def test_a_table_is_a_dict_of_rows(actions, seed):
    store, table, rng = new_store(), new_table(), np.random.default_rng(seed)
    pushes = {}  # of lookups that were not trained yet: keys, gradients, version, rows that were there
    for step, (action, keys) in enumerate(actions, 1):
        if action == "train":
            uses = rng.integers(1, 4, len(keys)).astype(np.uint32)
            found = store.lookup({"t": (np.array(keys), uses)}, LookupContext(True, step))["t"]
            table.see(Counter(dict(zip(keys, uses.tolist(), strict=True))), step)
            assert found.vectors.tolist() == [table.vector(key).tolist() for key in keys]
            pushes[step] = keys, [gradient_of(rng) for _ in keys], found.version, dict(table.rows)
            if len(pushes) == 2:  # one update for two lookups; the first may be of rows that have left since
                apply(store, table, pushes.values(), step)
                pushes = {}
        elif action == "look":
            before = store.table("t").version
            one = np.ones(len(keys), np.uint32)
            found = store.lookup({"t": (np.array(keys), one)}, LookupContext(False, step))["t"]
            assert found.vectors.tolist() == [table.vector(key).tolist() for key in keys]
            assert store.table("t").version == before
        elif action == "erase":
            there = set(keys) & set(table.rows)
            version = store.table("t").version
            assert store.table("t").erase(np.array(keys)) == len(there)
            assert set(store.table("t").evicted_since(version).tolist()) == there
            table.evict(keys)
        elif action == "clear":
            store.table("t").clear()
            table.rows.clear()
        else:
            store = moved(store, len(keys))
            pushes = {}  # their versions are of the other store
            table.dropped = 0
        check_table(Handle(store), table)
        assert store.table("t").stats()["dropped_gradients"] == table.dropped


def apply(store, table, pushes, step):
    """The gradients of rows that have left since their lookup are dropped, each by itself."""
    store.apply(
        {"t": [Push(np.array(keys), np.stack(values), version) for keys, values, version, _ in pushes]},
        {"t": rule()},
        {"t": step},
    )
    total = {}
    for keys, values, _, rows in pushes:
        for key, value in zip(keys, values, strict=True):
            if table.rows.get(key) is rows[key]:
                total[key] = total.get(key, 0) + torch.from_numpy(value)
            else:
                table.dropped += 1
    table.apply(total)


def moved(store, parts):
    """Another store with the same rows, by way of snapshots of parts."""
    whole = [store.table("t").snapshot(part, parts) for part in range(parts)]
    joined = Rows(*map(np.concatenate, zip(*whole, strict=True)))
    hashes = [mix(key) for key in joined.keys.tolist()]
    assert hashes == sorted(hashes)
    other = new_store()
    for part in reversed(whole):
        other.table("t").load(part)
    return other


def test_a_snapshot_has_parts_from_0_on():
    with pytest.raises(ValueError, match="expected a part from 0 to 2, got 3"):
        new_store().table("t").snapshot(3, 3)


@pytest.mark.parametrize("by_key", [False, True])
@given(
    rounds=st.lists(st.lists(st.tuples(KEYS, KEYS), min_size=1, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_owner_answers_all_ranks_and_adds_their_gradients(by_key, rounds, seed):
    """By rank and table; a key that several ranks ask for is one row, which all their gradients reach."""
    rng = np.random.default_rng(seed)
    store = MemoryStore()
    names = ["t", "u"]
    for name in names:
        store.add_table(kv.Table(DIM, init=kv.init.Constant(0.25)).spec(name, 0, 4))
    owner = Owner(store)
    rows = {name: {} for name in names}
    for step, ranks in enumerate(rounds, 1):
        asked = [[len(keys) for keys in of_rank] for of_rank in ranks]
        messages = [as_message(of_rank) for of_rank in ranks]
        answered = owner.lookup(names, asked, messages, LookupContext(True, step))
        for name, key in (
            (n, k) for of_rank in ranks for n, keys in zip(names, of_rank, strict=True) for k in keys
        ):
            rows[name].setdefault(key, np.full(DIM, 0.25, np.float32))
        order = [(n, k) for of_rank in ranks for n, keys in zip(names, of_rank, strict=True) for k in keys]
        expected = [rows[name][key].tolist() for name, key in order]
        assert answered.vectors.reshape(-1, DIM).tolist() == expected

        values = [gradient_of(rng) for _ in order]
        begins = [0, *itertools.accumulate(map(sum, asked))]
        flat = [np.concatenate(values[a:b]) for a, b in itertools.pairwise(begins)]
        summed = owner.reduce(answered, flat, complete=True, by_key=by_key)
        owner.update(names, [(answered, summed)], dict.fromkeys(names, rule()), dict.fromkeys(names, step))
        for name, key in set(order):
            mine = [value for one, value in zip(order, values, strict=True) if one == (name, key)]
            total = sum(mine) / np.float32(len(mine) if by_key else 1)
            rows[name][key] = rows[name][key] - np.float32(LR) * total
    for name in names:
        found = store.table(name).snapshot()
        assert sorted(found.keys.tolist()) == sorted(rows[name])
        for key, vector in zip(found.keys.tolist(), found.vectors, strict=True):
            np.testing.assert_allclose(vector, rows[name][key], rtol=1e-6, atol=1e-6)
