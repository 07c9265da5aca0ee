"""Tables of ranks on real GPUs: two ranks that share one, which go through memory, and one rank over NCCL."""

import pytest
import sharded_cuda_programs as programs
import torch
from ranks_helpers import run
from row_comparison import assert_equal, assert_same_tables, check_fits

from karvan.native import is_built

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCENARIOS = {
    "adagrad": {"prepare": True, "uneven": True, "rows": 200, "steps": 4},
    "at once": {"uneven": True, "rows": 200, "steps": 4},
    "adam": {"optimizer": "adam", "rows": 3000, "passes": 2},
    "features without gradients": {"unused": ["mean", "stack"], "optimizer": "adam"},
    "a rank without data": {"idle": True},
    "admission by counts": {"admit": 3, "rows": 60},
    "scaled": {"scale": 1024.0},
    "bfloat16 on the wire": {"wire": "bfloat16"},
}
LOOSE = {"bfloat16 on the wire": 0.05}
OF_RANKS = ("prepare", "uneven", "idle", "wire")


@pytest.fixture(scope="module")
def trained():
    """What two ranks on one GPU have made of each scenario."""
    results = run(
        2, "sharded_cuda_programs:train_all", timeout=400, scenarios=list(SCENARIOS.values()), device="cuda:0"
    )
    return {name: [result[i] for result in results] for i, name in enumerate(SCENARIOS)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_on_one_gpu_train_what_one_process_trains(trained, name):
    options = {k: v for k, v in SCENARIOS[name].items() if k not in OF_RANKS}
    expected = programs.train(device=None if is_built() else "cuda:0", shared=False, **options)
    tolerance = LOOSE.get(name, 2e-4)
    assert_same_tables(trained[name], expected, tolerance)
    for feature, out in expected["outputs"].items():
        together = torch.cat([result["outputs"][feature] for result in trained[name]]).to(out.device)
        torch.testing.assert_close(together, out, rtol=tolerance, atol=tolerance)


def test_keys_that_went_ahead_give_the_same_bits(trained):
    assert_equal(trained["adagrad"], trained["at once"])


def test_one_rank_over_nccl_trains_what_one_process_trains_on_the_gpu():
    """Up to rounding: the compiler fuses other operations in a kernel that only sums gradients."""
    options = {"rows": 200, "steps": 4, "optimizer": "adam"}
    ((alone, transport),) = run(
        1, "sharded_cuda_programs:train_over_nccl", timeout=300, device="cuda:0", **options
    )
    assert transport == "NcclTransport"
    assert_same_tables([alone], programs.train(device="cuda:0", shared=False, **options), 1e-5)


def test_a_rank_over_nccl_skips_a_step_that_is_not_finite():
    (result,) = run(1, "sharded_cuda_programs:late_steps", timeout=300, device="cuda:0")
    assert result["taken"] == [True, False, True]
    first, second, third = (vectors for _, vectors, *_ in result["rows"])
    assert (first == second).all()
    assert (first != third).all()


@pytest.mark.skipif(not is_built(), reason="its model first has tables in memory, by the native core")
def test_a_trainer_on_ranks_that_share_a_gpu_trains_what_one_process_trains():
    results = run(2, "sharded_cuda_programs:fit_over_gloo", timeout=300, ranks=2, device="cuda:0", epochs=2)
    check_fits(results, programs.fit(2, shared=False, epochs=2), 1e-3)
