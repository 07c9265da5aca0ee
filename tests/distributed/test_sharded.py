"""Sharded tables over real processes against one process on the same global batch."""

import numpy as np
import pytest
import sharded_programs
import torch
from ranks_helpers import run
from row_comparison import assert_equal, assert_same_tables, whole_table

FOUR = pytest.param(4, marks=pytest.mark.slow)
OPTIMIZERS = ["sgd", "momentum", "adagrad", "adam", "adamw", "ftrl"]
SCENARIOS = {
    **{optimizer: {"optimizer": optimizer} for optimizer in OPTIMIZERS},
    "bfloat16 rows": {"dtype": "bfloat16", "optimizer": "sgd"},
    "float16 rows": {"dtype": "float16", "optimizer": "sgd"},
    "keys ahead": {"prepare": True},
    "again": {},
    "a rank without data": {"idle": True},
    "features without gradients": {"unused": ["mean", "tile"]},
    "accumulated": {"passes": 3},
    "admission by counts": {"admit": 3},
    "many rows": {"rows": 700, "steps": 3},
    "bfloat16 on the wire": {"wire": "bfloat16"},
    "float16 on the wire": {"wire": "float16"},
    "sum over ranks": {"grad_reduce": "sum", "optimizer": "momentum"},
    "mean over those that have the key": {"grad_reduce": "key", "optimizer": "sgd", "steps": 1},
    "at most so many rows": {"evict": 30, "rows": 60},
    "at most so many rows of all tables": {"capacity": 50, "rows": 60},
}


@pytest.fixture(scope="module")
def trained():
    """What ranks have made of all scenarios, by their number."""
    made = {}

    def of(world):
        if world not in made:
            results = run(world, "sharded_programs:train_all", scenarios=list(SCENARIOS.values()))
            made[world] = {name: [r[i] for r in results] for i, name in enumerate(SCENARIOS)}
        return made[world]

    return of


@pytest.mark.parametrize("world", [1, 2, FOUR])
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *((optimizer, 1e-5) for optimizer in OPTIMIZERS),
        ("features without gradients", 1e-5),
        ("accumulated", 1e-5),
        ("sum over ranks", 1e-5),
        ("admission by counts", 1e-5),
        ("many rows", 1e-4),
        ("bfloat16 rows", 0.02),  # a step of rounding may go the other way
        ("float16 rows", 0.01),
        ("bfloat16 on the wire", 0.05),
        ("float16 on the wire", 0.01),
    ],
)
def test_ranks_train_what_one_process_trains(trained, world, name, tolerance):
    assert_like_one_process(trained(world)[name], name, tolerance)


@pytest.mark.parametrize("world", [2, FOUR])
def test_a_rank_without_data_changes_nothing(trained, world):
    assert_like_one_process(trained(world)["a rank without data"], "a rank without data", 1e-5)


def assert_like_one_process(results, name, tolerance):
    options = {k: v for k, v in SCENARIOS[name].items() if k not in ("idle", "wire")}
    expected = sharded_programs.train(shared=False, **options)
    assert_same_tables(results, expected, tolerance)
    for result in results:
        torch.testing.assert_close(result["some"], expected["some"], rtol=tolerance, atol=tolerance)
    for feature, out in expected["outputs"].items():
        together = torch.cat([result["outputs"][feature] for result in results])
        torch.testing.assert_close(together, out, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world", [1, 2, FOUR])
def test_repeats_and_keys_that_went_ahead_give_the_same_bits(trained, world):
    assert_equal(trained(world)["adagrad"], trained(world)["again"])
    assert_equal(trained(world)["adagrad"], trained(world)["keys ahead"])


def test_one_rank_gives_the_bits_of_one_process(trained):
    assert_equal(trained(1)["adagrad"], [sharded_programs.train(shared=False)])


def test_the_mean_of_a_key_is_over_the_ranks_that_have_it(trained):
    """After one step of SGD a row has moved by the mean of what it moves by in each rank's own process."""
    world = 2
    rows = 12
    batch = sharded_programs.global_batch(0, rows)
    alone = []
    for rank in range(world):
        mine = {k: v[rank * rows // world : (rank + 1) * rows // world] for k, v in batch.items()}
        alone.append(sharded_programs.train(shared=False, optimizer="sgd", steps=1, batches=[mine]))
    for name in alone[0]["tables"]:
        initial = whole_table([sharded_programs.initial(batch)], name)
        each = [whole_table([result], name) for result in alone]
        for key, (vector, *_) in whole_table(
            trained(world)["mean over those that have the key"], name
        ).items():
            moves = [table[key][0] - initial[key][0] for table in each if key in table]
            np.testing.assert_allclose(vector - initial[key][0], np.mean(moves, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [2, FOUR])
def test_every_rank_keeps_its_share_of_the_rows_that_are_allowed(trained, world):
    for result in trained(world)["at most so many rows"]:
        assert all(stats["rows"] <= -(-30 // world) for stats in result["stats"].values())
        assert any(stats["evicted"] for stats in result["stats"].values())


@pytest.mark.parametrize("world", [1, 2, FOUR])
def test_every_rank_has_the_capacity_for_all_of_its_tables(trained, world):
    for result in trained(world)["at most so many rows of all tables"]:
        assert sum(stats["rows"] for stats in result["stats"].values()) == 50
        assert sum(stats["evicted"] for stats in result["stats"].values()) > 0


@pytest.mark.parametrize("world", [2, FOUR])
def test_a_step_takes_few_collectives_whatever_the_number_of_tables(trained, world):
    steps, evaluations = 6, 2  # of which one looks some keys up
    for result in trained(world)["keys ahead"]:
        operations = {channel: count for channel, (count, _) in result["channels"].items()}
        assert operations["fit"] == 2 * steps  # numbers of keys, keys
        assert operations["main"] == 2 * steps + 3 * evaluations  # vectors, gradients; numbers, keys, vectors
