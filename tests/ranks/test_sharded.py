"""Sharded tables over real processes against one process on the same global batch."""

import numpy as np
import pytest
import sharded_programs
from ranks_helpers import run


def whole_table(results, name):
    """The rows of all ranks, by key; every key is on one rank."""
    rows = {}
    for result in results:
        for key, *row in zip(*result["tables"][name], strict=True):
            assert key not in rows
            rows[key] = row
    return rows


def assert_same_tables(results, expected, tolerance):
    for name in expected["tables"]:
        received, wanted = whole_table(results, name), whole_table([expected], name)
        assert received.keys() == wanted.keys()
        for key, row in wanted.items():
            vector, state, count, last = received[key]
            np.testing.assert_allclose(vector, row[0], rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(state, row[1], rtol=tolerance, atol=tolerance)
            assert (count, last) == (row[2], row[3])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "adam", "adamw", "ftrl"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_train_what_one_process_trains(optimizer, world):
    expected = sharded_programs.train(optimizer, shared=False)
    results = run(world, "sharded_programs:train", optimizer=optimizer)
    assert_same_tables(results, expected, 1e-5)
