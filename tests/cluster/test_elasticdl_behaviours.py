"""The numbered behaviours of ElasticDL's parameter servers, through processes and sockets."""

import itertools

import numpy as np
import pytest
import torch
from async_programs import batches, told, trainer_of
from dense_helpers import start_with
from reference_helpers import MOVES, Line, first, ids, on_all, push, slow, weight_of
from test_async_mode import assert_same

import karvan as kv
from karvan import distributed
from karvan.dense.remote import DenseServerProxy


def test_elasticdl_12_two_gradients_make_a_version_and_a_stale_one_is_rejected(job):
    job(1, mode="async", staleness=1, grads_to_wait=2, tolerance=0)
    sgd = {"name": "SGD", "options": {"lr": 0.5}}
    start_with(DenseServerProxy(distributed.current().servers, 0, 7), {"weight": torch.zeros(1, 1)}, sgd)
    one, two = push(7, 1, 0, "a", 0), push(7, 4, 0, "b", 0)
    assert [(each.accepted, each.version, each.applied) for each in (one, two)] == [
        (True, 0, False),
        (True, 1, True),
    ]
    assert weight_of(7)[:2] == (1, -0.5 * (1 + 4) / 2)
    late = push(7, 8, 0, "a", 1)
    assert (late.accepted, late.version, late.reason) == (False, 1, "stale")
    assert push(7, 2, 1, "a", 1).accepted  # the same push, from newer parameters
    assert push(7, 2, 1, "b", 1).version == 2
    assert weight_of(7)[:2] == (2, -1.25 - 0.5 * 2)


@pytest.mark.parametrize("servers", [2, slow(1), slow(4)])
def test_elasticdl_12_a_worker_computes_a_rejected_gradient_again(job, servers):
    job(servers, mode="async", staleness=1, grads_to_wait=2, tolerance=0)
    model = Line()
    inputs, labels = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])
    seen = []

    def loss(output, batch):
        seen.append(model.weight.item())
        if len(seen) == 1:  # meanwhile others make a step, with a gradient of 1 each
            owner = weight_of(1, servers)[2]
            for trainer, server in itertools.product("bc", range(servers)):
                assert push(1, 1 if server == owner else None, 0, trainer, 0, server).accepted
        return (output - labels).square().mean()

    trainer = kv.Trainer(model, loss, dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.25), progress="none")
    trainer.fit([{"x": inputs}])
    after_others = -0.25 * 1.0
    gradient = np.mean(2 * (after_others * inputs.numpy() - labels.numpy()) * inputs.numpy())
    assert seen == [0.0, after_others]
    assert model.weight.item() == pytest.approx(after_others - 0.25 * gradient)
    assert weight_of(1, servers)[:2] == (2, model.weight.item())
    assert trainer.dense.staleness.rejected == 1
    assert [each["1"]["rejected"] for each in told(trainer)] == [1] * servers


def test_elasticdl_13_each_push_is_a_version_and_stale_ones_count_less(job):
    job(1, mode="async", staleness=1, lr_staleness=True)
    sgd = {"name": "SGD", "options": {"lr": 0.5}}
    start_with(DenseServerProxy(distributed.current().servers, 0, 7), {"weight": torch.zeros(1, 1)}, sgd)
    expected = 0.0
    for version, (seen, value) in enumerate([(0, 1), (0, 2), (0, 3), (1, 4), (4, 5), (0, 6)]):
        answer = push(7, value, seen, f"trainer {value}", 0)
        assert (answer.accepted, answer.version, answer.staleness) == (True, version + 1, version - seen)
        expected -= 0.5 / max(1, version - seen) * value
        assert weight_of(7)[:2] == (version + 1, pytest.approx(expected))


@on_all
def test_elasticdl_13_a_lazily_read_row_is_stable_across_pulls(job, servers, way):
    send = job(servers, way, mode="async", staleness=2)
    keys = list(range(20))
    for _ in range(2):  # two engines with the same rows
        engine = kv.EmbeddingEngine({"products": kv.Table(3)})
        for _ in range(3):
            out = engine(send({"products": ids(*keys)}))["products"]
            assert torch.equal(out, first("products", keys, 3))
        assert engine.table("products").rows == 20


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_elasticdl_14_on_m_servers_training_goes_on_as_if_n_had_never_stopped(job, tmp_path, before, after):
    # Rows, counters of admission, dense parameters and both optimizers' states move, and steps go on. Only
    # the servers' versions begin at 0 with every fit, for all trainers at once.
    def fit(servers, folder, steps):
        job(servers, mode="async", staleness=1)
        trainer = trainer_of(tmp_path / folder)
        result = trainer.fit(batches(), max_steps=steps)
        assert result.step == steps
        return [each["1"]["version"] for each in told(trainer)]

    assert fit(before, "straight", 6) == [6] * before
    assert fit(before, "moved", 5) == [5] * before
    assert fit(after, "moved", 6) == [1] * after
    assert_same(tmp_path / "moved", tmp_path / "straight", 6)
    saved = kv.Checkpoints(tmp_path / "moved").latest()
    assert [float(slots["step"]) for slots in saved.state()["dense_optimizer"]["state"].values()] == [6.0] * 4
