"""Ranks whose model is on a GPU train what one process trains there."""

import pytest
import torch
from gpu_programs import fit
from ranks_helpers import run
from test_trainer_ranks import assert_same_bits, assert_trained_the_same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def sums_in_the_same_order(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the processes that a test starts


def test_one_rank_over_nccl_has_the_bits_of_a_process_without_ranks():
    ((plain, sharded, told),) = run(1, "gpu_programs:one_rank", device=DEVICE)
    assert told == ("ProcessGroupNCCL", [1.0, 1.0, 1.0])
    assert_same_bits([plain], [sharded])
    assert plain["result"].metrics == sharded["result"].metrics
    assert plain["result"].evaluation == sharded["result"].evaluation


def test_two_ranks_that_share_a_gpu_train_what_one_process_trains_there():
    results = run(2, "gpu_programs:two_ranks", device=DEVICE)
    first, again = ([result[number] for result in results] for number in (0, 1))
    expected = fit(2, DEVICE)
    assert_trained_the_same(first, expected, tolerance=1e-4)
    for each in first:
        assert each["result"].evaluation.keys() == expected["result"].evaluation.keys()
        assert each["result"].evaluation["loss"] == pytest.approx(
            expected["result"].evaluation["loss"], rel=1e-4
        )
    assert_same_bits(first, again)
