"""Hand-written loops over real processes against the Trainer on the same data."""

import numpy as np
import pytest
import torch
from cluster_helpers import serving
from ranks_helpers import run


@pytest.fixture(scope="module", params=["sharded", "remote"])
def results(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("run"))
    if request.param == "sharded":
        return run(2, "context_programs:run_all", path=path, kind="sharded")
    with serving(3) as addresses:
        return run(2, "context_programs:run_all", path=path, kind="remote", servers=addresses)


pytestmark = pytest.mark.slow


def assert_same_bits(one, other):
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name])
    for name, rows in one[1].items():
        for left, right in zip(rows, other[1][name], strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("scenario", ["uneven", "accumulated", "anywhere"])
def test_ranks_train_in_a_loop_what_the_trainer_trains(results, scenario):
    for each in results:
        assert_same_bits(each[scenario]["context"], each[scenario]["trainer"])


@pytest.mark.parametrize("scenario", ["uneven", "accumulated"])
def test_a_rank_whose_data_has_ended_gets_batches_without_rows(results, scenario):
    first, second = (each[scenario] for each in results)
    assert (first["empty"], second["empty"]) == (0, 4)  # 5 and 3 batches, two epochs
    for each in (first, second):
        assert each["counts"][0] == each["counts"][1]
        assert each["sizes"] == {
            name: sum(len(other["context"][1][name][0]) for other in (first, second))
            for name in each["sizes"]
        }


def test_a_loop_of_several_ranks_goes_on_from_a_checkpoint(results):
    for each in (result["resumed"] for result in results):
        assert each["steps"][0] == each["steps"][1]
        assert each["samples"] == (170, 170)
        assert_same_bits(*each["both"])
        assert each["sizes"] == {"user": 0, "history": 0}
