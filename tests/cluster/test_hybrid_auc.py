"""How well hybrid training learns: at staleness 8 within 0.1 % of the AUC of synchronous training.

Synchronous training gives the bits of training in memory (test_remote.py), which takes less time.
"""

from functools import partial
from pathlib import Path

import adult
import pytest
import torch
from cluster_helpers import serving

import karvan as kv
from karvan import distributed
from karvan.cli.commands.demo import run_demo

ADULT = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "adult"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def hybrid(work):
    """What work gives with rows on two servers, at staleness 8."""
    with serving(2) as addresses:
        distributed.connect("remote", servers=addresses, staleness=8)
        return work()


def synthetic(folder):
    return run_demo(folder, 1_000_000, 2, quiet=True, shown=False)


@pytest.mark.slow
def test_the_synthetic_task(tmp_path):
    expected = synthetic(tmp_path / "memory")
    received = hybrid(lambda: synthetic(tmp_path / "remote"))
    assert received["auc"] > expected["auc"] * 0.999
    assert received["reloaded_auc"] == received["auc"]


def adult_auc():
    torch.manual_seed(0)
    ids = [*adult.CATEGORIES, *(f"{name}_bucket" for name in adult.BUCKETS)]
    trainer = kv.Trainer(
        kv.models.DCN(adult.NUMBERS, ids, dim=8, hidden=(64, 32), seed=0),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=partial(torch.optim.Adam, lr=1e-3),
        sparse_optimizer=kv.optim.Adagrad(lr=0.05),
        metrics={"auc": kv.metrics.AUC(exact=True)},
        progress="none",
    )
    made = adult.features().fit(adult.read(ADULT / "adult.data", 4096))
    data = adult.read(ADULT / "adult.data", 256, shuffle=50_000, seed=0, transform=made)
    return trainer.fit(
        data, epochs=2, eval_data=adult.read(ADULT / "adult.test", 4096, transform=made)
    ).evaluation["auc"]


@pytest.mark.slow
@pytest.mark.skipif(not ADULT.exists(), reason="needs the Adult data")
def test_adult():
    expected = adult_auc()
    received = hybrid(adult_auc)
    assert expected > 0.91
    assert received > expected * 0.999
