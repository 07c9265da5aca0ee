"""Requests of distinct keys on a device, for any number of ranks, against a slow reference."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from karvan.distributed.connection import Connection, ConnectionSettings
from karvan.store import LookupContext
from karvan.store.cuda.key_request import KeyRequest
from karvan.store.cuda.row_owner import Sections
from karvan.store.cuda.sharded import ShardedCudaStore
from karvan.store.cuda.store import CudaStore
from karvan.store.cuda.table_memory import TableMemory
from karvan.store.messages import hashes_of, owners_of
from karvan.store.program import FeatureTensors, LookupProgram, OutputLayout
from karvan.store.types import FeatureSpec, Push, Rule, TableSpec

KEYS = [0, 1, -1, -2, 2**63 - 1, -(2**63), *(5**n for n in range(20))]
DIMS = {"a": 4, "b": 3, "c": 4}
FEATURES = [
    FeatureSpec("first", "a", dim=4),
    FeatureSpec("second", "b", dim=3, mode="padded"),
    FeatureSpec("third", "a", dim=4, mode="cells"),
    FeatureSpec("fourth", "c", dim=4, stack=2),
]
LENGTH = 2
samples = st.lists(st.lists(st.sampled_from(KEYS), max_size=3), min_size=2, max_size=2)


def store_of():
    store = CudaStore("cpu")
    add_tables(store)
    return store


def add_tables(store):
    for name, dim in DIMS.items():
        init = ("uniform", -0.1, 0.1, 0.0, 0.0)
        store.add_table(
            TableSpec(name, dim, "float32", init, ("always", 0.0, 0), ("never", 0.0, 0), seed=1, shards=4)
        )


def inputs_of(batch):
    made = []
    for spec, lists in zip(FEATURES, batch, strict=True):
        offsets = torch.tensor(np.concatenate([[0], np.cumsum([len(each) for each in lists])]))
        values = torch.tensor([key for each in lists for key in each for _ in range(spec.stack)])
        layout = OutputLayout(len(lists), int(offsets[-1]), LENGTH if spec.mode == "padded" else 1, offsets)
        made.append(FeatureTensors(values.long(), None, layout))
    return tuple(made)


def occurrences(batch):
    """The keys of each table that are looked up, as often as they are."""
    found = {name: [] for name in DIMS}
    for spec, lists in zip(FEATURES, batch, strict=True):
        for each in lists:
            wanted = each[:LENGTH] if spec.mode == "padded" else each
            found[spec.table] += [key for key in wanted for _ in range(spec.stack)]
    return found


@given(batch=st.tuples(*(samples for _ in FEATURES)), ranks=st.integers(1, 5))
@settings(max_examples=10)
def test_a_request_has_each_distinct_key_once_in_the_message_of_its_owner(batch, ranks):
    store, program = store_of(), LookupProgram(FEATURES)
    request = KeyRequest(
        store.prepare(program, inputs_of(batch)), len(DIMS), ranks, TableMemory(torch.device("cpu"))
    )
    keys, uses = request.sections.split_keys(request.message)
    wanted, rows_of = occurrences(batch), {}
    rows = request.sections.split_values(request.key_rows)
    for part, (own, times, places) in enumerate(zip(keys, uses, rows, strict=True)):
        rank, table = part // len(DIMS), list(DIMS)[part % len(DIMS)]
        owned = [k for k in wanted[table] if owners_of(hashes_of(np.array([k], np.int64)), ranks)[0] == rank]
        expected = {key: owned.count(key) for key in owned}
        assert dict(zip(own.tolist(), times.tolist(), strict=True)) == expected
        assert len(own) == len(expected)
        rows_of |= {(table, key): row for key, row in zip(own.tolist(), places.tolist(), strict=True)}
    assert len(set(rows_of.values())) == len(rows_of)
    assert all(row >= request.front for row in rows_of.values())
    for group in request.groups:
        for (number, feature), base in zip(group.layout.features, group.layout.bases, strict=True):
            table = FEATURES[number].table
            own = group.buffers.rows[base : base + feature.positions].tolist()
            for row, key in zip(own, request.batch.ids[number].values.tolist(), strict=True):
                assert row in (0, rows_of.get((table, key)))
    looked_up = sum(int((group.buffers.rows > 0).sum()) for group in request.groups)
    assert looked_up == sum(map(len, wanted.values()))


@given(
    counts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_sections_place_every_vector_in_its_own_whole_units(counts):
    sections = Sections(np.array(counts, np.int64), [1, 4, 6])
    floats = torch.zeros(sections.floats)
    for number, part in enumerate(sections.split_vectors(floats)):
        assert part.shape == (np.array(counts).reshape(-1)[number], [1, 4, 6][number % 3])
        assert part.shape[0] == 0 or (part.data_ptr() - floats.data_ptr()) % 16 == 0
        part += 1
    assert float(floats.sum()) == sum(
        count * dim for of_rank in counts for count, dim in zip(of_rank, [1, 4, 6], strict=True)
    )


def test_wrong_offsets_on_the_device_are_an_error():
    batch = list(inputs_of([[[1], [2, 3]]] * len(FEATURES)))
    store, program = store_of(), LookupProgram(FEATURES)
    made = store.prepare(program, tuple(batch))
    made.ids[0] = made.ids[0]._replace(offsets=torch.tensor([0, 5, 3]))
    with pytest.raises(ValueError, match="wrong offsets"):
        KeyRequest(made, len(DIMS), 2, TableMemory(torch.device("cpu")))


@pytest.mark.parametrize("reduce", ["mean", "key", "sum"])
def test_lookups_and_pushes_of_a_single_rank_are_those_of_a_store_on_the_device(reduce):
    sharded = ShardedCudaStore(Connection(ConnectionSettings(grad_reduce=reduce)), "cpu")
    alone = store_of()
    keys = np.array([5, -7, 0, 2**63 - 1], np.int64)
    counts = np.array([3, 1, 2, 5], np.uint32)
    made = []
    for store in (sharded, alone):
        if store is sharded:
            add_tables(store)
        store.table("b").set_state([0.1] * 3, False)
        found = store.lookup({"b": (keys, counts), "a": (keys[:1], counts[:1])}, LookupContext(True, 2))
        push = Push(keys[:3], np.arange(9, dtype=np.float32).reshape(3, 3), found["b"].version)
        store.apply({"b": [push]}, {"b": Rule("adagrad", lr=0.1, eps=1e-8)}, {"b": 1})
        again = store.lookup({"b": (keys, counts)}, LookupContext(False, 3))
        made.append(
            [found["b"].vectors, found["a"].vectors, again["b"].vectors, *store.table("b").snapshot()]
        )
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)
    assert dict(zip(made[0][3].tolist(), made[0][6].tolist(), strict=True)) == dict(
        zip(keys.tolist(), counts.tolist(), strict=True)
    )
