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


def synthetic_auc(paths):
    """A DLRM on two epochs of a log of 500 users and 100 items."""
    torch.manual_seed(0)
    ids = ["user", "item", "category", "device", "hour", "liked"]
    usual = kv.Table(16, combiner="mean", init=kv.init.Uniform(-0.25, 0.25))
    liked = kv.Table(16, combiner="mean", init=usual.init, name="category")
    steps = 2 * 440
    trainer = kv.Trainer(
        kv.models.DLRM(
            ["price", "recency"],
            ids,
            dim=16,
            bottom=(64,),
            top=(128, 64),
            table=dict.fromkeys(ids, usual) | {"liked": liked},
        ),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        sparse_optimizer=kv.optim.AdamW(lr=0.02, weight_decay=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps),
        metrics={"auc": kv.metrics.AUC()},
        progress="none",
    )
    features = kv.FeatureEngine(
        [
            kv.Feature("price").log1p(),
            kv.Feature("recency").log1p(),
            kv.Feature("liked").select("history").mod(10),
        ]
    )
    train = kv.data.read(paths[:-1], 2048, shuffle=200_000, seed=1, transform=features)
    return trainer.fit(
        train, epochs=2, eval_data=kv.data.read(paths[-1:], 2048, transform=features)
    ).evaluation["auc"]


@pytest.mark.slow
def test_the_synthetic_task(tmp_path):
    log = kv.data.synthetic.ClickLog(seed=3, users=500, items=100, categories=10)
    paths = log.write(tmp_path, 1_000_000, files=10).paths
    expected = synthetic_auc(paths)
    assert hybrid(lambda: synthetic_auc(paths)) > expected * 0.999


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
