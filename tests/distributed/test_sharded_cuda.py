"""Tables on the devices of several ranks, in Triton's interpreter, against tables in one process's memory."""

import os

import numpy as np
import pytest
import sharded_cuda_programs as programs
import torch
from ranks_helpers import run
from row_comparison import assert_equal, assert_same_tables, check_fits, whole_table

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter; tests/gpu has the rest"
)
FEW = ["pooled", "mean", "sequence", "single"]
QUICK = {
    "few features": {"steps": 2, "prepare": True, "uneven": True, "features": FEW},
    "sum over ranks": {"grad_reduce": "sum", "steps": 2, "features": FEW},
    "mean over those that have the key": {
        "grad_reduce": "key",
        "optimizer": "sgd",
        "steps": 1,
        "features": FEW,
    },
}
SLOW = {
    "adagrad": {"steps": 2, "prepare": True, "uneven": True},
    "at once": {"steps": 2, "uneven": True},
    "adam": {"optimizer": "adam"},
    "bfloat16 rows": {"dtype": "bfloat16", "optimizer": "sgd", "steps": 2},
    "over the network": {"transport": "network", "steps": 2},
    "a rank without data": {"idle": True},
    "features without gradients": {"unused": ["mean", "stack"], "optimizer": "adam"},
    "a rank without some gradients": {"unused_on": 1, "optimizer": "adam"},
    "mean of gradients of some ranks": {
        "unused_on": 1,
        "grad_reduce": "key",
        "optimizer": "sgd",
        "steps": 1,
    },
    "accumulated": {"passes": 2},
    "scaled": {"scale": 1024.0, "steps": 2},
    "bfloat16 on the wire": {"wire": "bfloat16"},
    "float16 on the wire": {"wire": "float16"},
    "admission by counts": {"admit": 3, "rows": 16},
    "at most so many rows": {"evict": 12, "rows": 12, "steps": 4},
}
SCENARIOS = {**QUICK, **SLOW}
ALIKE = {
    "few features": 1e-5,
    "sum over ranks": 1e-5,
    "adagrad": 1e-5,
    "adam": 1e-5,
    "over the network": 1e-5,
    "a rank without data": 1e-5,
    "features without gradients": 1e-5,
    "accumulated": 1e-5,
    "scaled": 1e-5,
    "admission by counts": 1e-5,
    "bfloat16 rows": 0.02,  # a step of rounding may go the other way
    "bfloat16 on the wire": 0.05,
    "float16 on the wire": 0.01,
}
OF_RANKS = ("prepare", "uneven", "idle", "wire", "transport")


def of(names):
    """One parameter for each; those of the slow scenarios are slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def trained():
    """What two ranks have made of a scenario."""
    made = {}

    def of_scenario(name):
        if name not in made:
            made[name] = run(2, "sharded_cuda_programs:train", timeout=300, **SCENARIOS[name])
        return made[name]

    return of_scenario


def expected_of(name):
    options = {k: v for k, v in SCENARIOS[name].items() if k not in OF_RANKS}
    return programs.train(device=None, shared=False, **options)


@pytest.mark.parametrize("name", of(ALIKE))
def test_ranks_train_what_one_process_trains_in_memory(trained, name):
    results, expected, tolerance = trained(name), expected_of(name), ALIKE[name]
    assert_same_tables(results, expected, tolerance)
    for result in results:
        torch.testing.assert_close(result["some"], expected["some"], rtol=tolerance, atol=tolerance)
    for feature, out in expected["outputs"].items():
        together = torch.cat([result["outputs"][feature] for result in results])
        torch.testing.assert_close(together, out, rtol=tolerance, atol=tolerance)


def check_means_of_keys(results, features=None, unused_on=None):
    """After one step of SGD a row has moved by the mean of what it moves by in each rank's own process."""
    rows = 6
    batch = programs.global_batch(0, rows)
    alone = []
    for rank in range(2):
        mine = {k: v[rank * rows // 2 : (rank + 1) * rows // 2] for k, v in batch.items()}
        unused = ("mean", "sqrtn") if rank == unused_on else ()
        alone.append(
            programs.train(
                device=None,
                shared=False,
                optimizer="sgd",
                steps=1,
                batches=[mine],
                unused=unused,
                features=features,
            )
        )
    for name in alone[0]["tables"]:
        initial = whole_table([programs.initial(batch)], name)
        each = [whole_table([result], name) for result in alone]
        for key, (vector, *_) in whole_table(results, name).items():
            moves = [table[key][0] - initial[key][0] for table in each if key in table]
            moves = [move for move in moves if move.any()] or [np.zeros_like(vector)]  # others have none
            np.testing.assert_allclose(vector - initial[key][0], np.mean(moves, 0), rtol=1e-4, atol=1e-5)


def test_the_mean_of_a_key_is_over_the_ranks_that_have_it(trained):
    check_means_of_keys(trained("mean over those that have the key"), features=FEW)


@pytest.mark.slow
def test_the_mean_of_a_key_is_over_the_ranks_that_have_a_gradient_of_it(trained):
    check_means_of_keys(trained("mean of gradients of some ranks"), unused_on=1)


@pytest.mark.slow
def test_keys_without_a_gradient_on_any_rank_keep_their_rows(trained):
    """Adam would move rows by their moments if their gradients counted as zeros."""
    every, some = (whole_table(trained(name), "sqrtn") for name in ("adam", "a rank without some gradients"))
    assert every.keys() == some.keys()
    untouched = [key for key, (_, state, *_) in some.items() if not state.any()]
    assert untouched
    batches = [programs.global_batch(step, 6)["sqrtn"] for step in range(3)]
    of_first = {int(key) for batch in batches for sample in batch[:3] for key in sample}
    assert not of_first.intersection(untouched)
    start = whole_table([programs.initial(programs.global_batch(0, 6))], "sqrtn")
    for key in start.keys() & set(untouched):
        np.testing.assert_array_equal(some[key][0], start[key][0])


@pytest.mark.slow
def test_repeats_and_keys_that_went_ahead_give_the_same_bits(trained):
    again = run(2, "sharded_cuda_programs:train", timeout=300, **SCENARIOS["adagrad"])
    assert_equal(trained("adagrad"), again)
    assert_equal(trained("adagrad"), trained("at once"))


@pytest.mark.slow
def test_one_rank_gives_the_bits_of_one_process():
    (alone,) = run(1, "sharded_cuda_programs:train", timeout=300, steps=2, transport="auto")
    assert_equal([alone], [programs.train(shared=False, steps=2)])


@pytest.mark.slow
def test_every_rank_keeps_its_share_of_the_rows_that_are_allowed(trained):
    for result in trained("at most so many rows"):
        assert all(stats["rows"] <= 6 for stats in result["stats"].values())
        assert any(stats["evicted"] for stats in result["stats"].values())


@pytest.mark.slow
def test_checkpoints_of_two_ranks_continue_on_one_and_the_other_way_round(tmp_path):
    options = {"admit": 2, "optimizer": "adam", "steps": 2, "rows": 16}
    of_two, of_one = str(tmp_path / "two"), str(tmp_path / "one")
    two = run(2, "sharded_cuda_programs:train", timeout=300, save=of_two, **options)
    one = programs.train(device=None, shared=False, save=of_one, **options)
    assert_same_tables(two, one, 1e-5)
    later = {**options, "seed": 2}
    on_one = programs.train(shared=False, load=of_two, **later)
    on_two = run(2, "sharded_cuda_programs:train", timeout=300, load=of_one, **later)
    assert_same_tables(on_two, on_one, 1e-5)
    expected = programs.train(device=None, shared=False, load=of_one, **later)
    assert_same_tables(on_two, expected, 1e-5)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_skips_its_row_alone_and_all_ranks_can_know():
    results = run(2, "sharded_cuda_programs:not_finite", timeout=300)
    for result in results:
        assert not result["finite"]
        assert result["flags"] == ([False, True], [True, True], [True, False])
    assert sum(result["skipped"] for result in results) == 1
    for name in ("user", "item"):
        before, after = (
            whole_table([{"tables": r[when]} for r in results], name) for when in ("before", "after")
        )
        assert before.keys() == after.keys() == {1, 2, 3, 4, 5}
        for key in before:
            stays = name == "item" or key == 3
            assert (before[key][0] == after[key][0]).all() == stays


def test_ranks_skip_a_step_together_that_is_not_finite_on_one_of_them():
    results = run(2, "sharded_cuda_programs:late_steps", timeout=300)
    for result in results:
        assert result["taken"] == [True, False, True]
        first, second, third = (
            dict(zip(keys.tolist(), vectors, strict=True)) for keys, vectors, *_ in result["rows"]
        )
        for key, vector in first.items():
            assert (vector == second[key]).all()
            assert (vector != third[key]).all()


@pytest.mark.slow
def test_a_trainer_on_ranks_trains_what_one_process_trains():
    results = run(2, "sharded_cuda_programs:fit", timeout=400, ranks=2)
    check_fits(results, programs.fit(2, shared=False), 1e-4)
