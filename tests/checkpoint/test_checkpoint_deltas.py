"""Deltas: full saves with fewer bytes, in an order that is proven."""

import shutil

import numpy as np
import pytest
import torch
from checkpoint_helpers import Model, same_rows
from few_examples import few_examples
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.checkpoint import CheckpointError
from karvan.store import Rows

_keys = st.lists(st.integers(-8, 8), min_size=1, max_size=6)
_moves = st.one_of(
    st.tuples(st.just("train"), _keys),
    st.tuples(st.just("erase"), _keys),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("load"), _keys),
    st.tuples(st.just("save"), st.sampled_from([60, 10_000])),
)


@few_examples(6)
@given(
    st.lists(_moves, min_size=3, max_size=14),
    st.sampled_from(
        [
            {},
            {"dtype": torch.bfloat16},
            {"evict": kv.eviction.LRU(4)},
            {"admit": kv.admission.MinCount(2, slots=64)},
        ]
    ),
)
def test_a_delta_equals_a_full_save(tmp_path_factory, moves, options):
    folder = tmp_path_factory.mktemp("deltas")
    model = Model(3, **options)
    checkpoints = kv.Checkpoints(folder / "run", full_every=5, keep_last=None)
    step, saved = 0, {}
    for kind, value in [("train", [1, 2]), ("save", 60), *moves, ("save", 60)]:
        table = model.embeddings.table("user")
        if kind == "train":
            model.step(value)
        elif kind == "erase":
            table.evict_keys(value)
        elif kind == "clear":
            table.clear()
        elif kind == "load":
            keys = np.unique(value)
            n, state = len(keys), len(table.initial_state)
            table.load(
                Rows(keys, *(np.ones((n, d), np.float32) for d in (3, state)), *[np.ones(n, np.uint32)] * 2)
            )
        else:
            step += 1
            checkpoints.part_bytes = value  # the number of parts may change within a chain
            checkpoints.save(step, model.state(), model)
            saved[step] = model.rows()
    checkpoints.wait()
    there = checkpoints.list()
    assert [c.step for c in there] == list(saved)
    for checkpoint in there:
        other = Model(3, **options)
        checkpoint.load(other)
        assert same_rows(other.rows(), saved[checkpoint.step])
        for key in range(-8, 9):
            row = kv.checkpoint.row(checkpoint.path, "user", key)
            at = np.flatnonzero(saved[checkpoint.step]["user"].keys == key)
            assert (row is not None) == (len(at) == 1)
            if row is not None:
                assert np.array_equal(row.vector, saved[checkpoint.step]["user"].vectors[at[0]])


def _run(folder, steps, **options):
    """A run that saves after every step; returns the model's rows at each."""
    model = Model(optimizer="Adam")
    checkpoints = kv.Checkpoints(folder, **options)
    rows = {}
    for step in range(1, steps + 1):
        model.train_on(1, seed=step, keys=20_000, size=64)
        checkpoints.save(step, model.state(), model, block=True)
        rows[step] = model.rows()
    return rows


def test_full_every_n_has_n_minus_1_deltas_between_full_ones(tmp_path):
    _run(tmp_path, 7, full_every=3, keep_last=None)
    there = kv.Checkpoints(tmp_path).list()
    assert [c.kind for c in there] == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert [[below.step for below in c.chain] for c in there[2:5]] == [[1, 2, 3], [4], [4, 5]]
    last = there[5]
    assert last.manifest.tables["user"].rows < there[3].manifest.tables["user"].rows


def test_pruning_keeps_what_a_kept_delta_needs(tmp_path):
    rows = _run(tmp_path, 9, full_every=4, keep_last=2)
    assert [c.step for c in kv.Checkpoints(tmp_path).list()] == [5, 6, 7, 8, 9]
    model = Model(optimizer="Adam")
    kv.Checkpoints(tmp_path).list()[-2].load(model)
    assert same_rows(model.rows(), rows[8])


def test_a_missing_link_is_an_error_that_names_it(tmp_path):
    _run(tmp_path, 4, full_every=4)
    shutil.rmtree(tmp_path / "step-000000000002")
    newest = kv.Checkpoints(tmp_path).latest()
    with pytest.raises(
        CheckpointError, match=r"step-000000000003: expected its base of step 2.*no such folder"
    ):
        newest.load(Model(optimizer="Adam"))
    assert "expected its base of step 2" in kv.checkpoint.verify(newest.path)[0].problem


def test_a_foreign_base_is_an_error(tmp_path):
    _run(tmp_path / "a", 3, full_every=3)
    _run(tmp_path / "b", 3, full_every=3)
    shutil.rmtree(tmp_path / "a" / "step-000000000002")
    shutil.copytree(tmp_path / "b" / "step-000000000002", tmp_path / "a" / "step-000000000002")
    with pytest.raises(CheckpointError, match=r"expected a base of step 2 with id .*, got step 2 with id"):
        kv.checkpoint.find(tmp_path / "a").load(Model(optimizer="Adam"))


def test_links_in_the_wrong_order_are_an_error(tmp_path):
    _run(tmp_path, 3, full_every=3)
    one, two = tmp_path / "step-000000000001", tmp_path / "step-000000000002"
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    with pytest.raises(CheckpointError, match="expected a base of step 2"):
        kv.checkpoint.find(tmp_path).load(Model(optimizer="Adam"))


def test_what_a_delta_cannot_describe_is_saved_in_full(tmp_path):
    model = Model().train_on(2)
    checkpoints = kv.Checkpoints(tmp_path, full_every=10, keep_last=None)

    def save(step):
        checkpoints.save(step, model.state(), model, block=True)
        return checkpoints.latest().kind

    assert save(1) == "full"
    assert save(2) == "delta"
    model.optimizer = kv.optim.Adam(lr=0.1)  # rows have other state now
    model.optimizer.attach(model)
    assert save(3) == "full"
    shutil.rmtree(tmp_path / "step-000000000003")  # its base is gone
    assert save(4) == "full"
    assert save(4) == "full"  # takes the place of its own base
    assert save(5) == "delta"
    assert kv.Checkpoints(tmp_path, full_every=10)._last is None
    fresh = Model(optimizer="Adam")
    kv.checkpoint.find(tmp_path).load(fresh)
    assert same_rows(fresh.rows(), model.rows())


def test_resuming_begins_with_a_full_one_and_goes_on_with_deltas(tmp_path):
    _run(tmp_path, 2, full_every=3)
    model = Model(optimizer="Adam")
    checkpoints = kv.Checkpoints(tmp_path, full_every=3)
    model.restore(checkpoints.latest().load(model))
    for step in (3, 4):
        model.train_on(1, seed=step)
        checkpoints.save(step, model.state(), model, block=True)
    assert [(c.step, c.kind) for c in checkpoints.list()] == [
        (1, "full"),
        (2, "delta"),
        (3, "full"),
        (4, "delta"),
    ]
