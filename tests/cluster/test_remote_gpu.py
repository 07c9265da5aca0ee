"""A model on a GPU, with its rows on parameter servers."""

import numpy as np
import pytest
import torch
from cluster_helpers import serving
from test_context_remote import context, train
from test_remote_training import assert_same_checkpoint, batches, content, trainer_of

from karvan import distributed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def fit(folder, **options):
    trainer = trainer_of(folder, device="cuda", **options)
    trainer.fit(batches(), epochs=2, eval_data=batches(2))
    assert next(trainer.model.parameters()).is_cuda
    return trainer


@pytest.mark.parametrize("servers", [1, 3])
def test_synchronous_servers_hold_what_memory_would(tmp_path, servers):
    fit(tmp_path / "memory")
    with serving(servers) as addresses:
        distributed.connect("remote", servers=addresses)
        fit(tmp_path / "remote")
        ctx = train(context(device="cuda"))
        assert torch.isfinite(ctx.model.out.bias).all()
    assert_same_checkpoint(tmp_path / "remote" / f"step-{24:012d}", tmp_path / "memory" / f"step-{24:012d}")


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}])
def test_lookups_run_ahead_of_a_gpu_within_the_bound(tmp_path, options):
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=4, wire="bfloat16")
        trainer = fit(tmp_path, **options)
        assert trainer.step == 24
        assert 1 <= trainer.model.embeddings.store.staleness.most <= 4


def test_dense_parameters_on_servers_follow_those_of_a_gpu(tmp_path):
    fit(tmp_path / "memory")
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, mode="async", staleness=1)
        fit(tmp_path / "async")
    (tables, state), (expected, expected_state) = (
        content(tmp_path / name / f"step-{24:012d}") for name in ("async", "memory")
    )
    # Steps are made by the servers' CPUs here, and by the GPU there.
    for name, parameter in expected_state["model"].items():
        if isinstance(parameter, torch.Tensor):
            torch.testing.assert_close(state["model"][name].cpu(), parameter.cpu(), rtol=1e-4, atol=1e-5)
    for name, columns in expected.items():
        np.testing.assert_array_equal(tables[name][0], columns[0])
        np.testing.assert_allclose(tables[name][1], columns[1], rtol=1e-3, atol=1e-5)
