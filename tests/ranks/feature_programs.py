"""What the ranks do in `test_feature_ranks.py`: fits on shares of data, and errors of one rank."""

import numpy as np
import torch

import karvan as kv
from karvan import ranks


def records():
    random = np.random.default_rng(3)
    prices = (random.normal(size=1001) * 7 + 1e6).astype(np.float32)
    prices[::10] = np.nan
    return {"price": prices, "city": random.choice(["Rome", "Oslo", "Bonn", "Lima", ""], 1001).tolist()}


def engine_of(**options):
    return kv.FeatureEngine(
        [kv.Feature("price").normalise(), kv.Feature("city").vocabulary(max_words=3)], **options
    )


def plain(engine):
    """What was fitted, to be compared bit by bit."""
    state = engine.get_extra_state()
    return {"price": state["price"].tolist(), "city": engine.features[1].ops[-1].words}


def fit_shares():
    kv.connect("sharded", timeout=60)
    rank = ranks.current().rank
    made = {"even": plain(engine_of().fit(kv.data.read(records(), 64)))}
    whole = list(kv.data.read(records(), 100, rank=0, world=1))
    made["uneven"] = plain(engine_of().fit(whole[:2] if rank else whole[2:]))
    made["all on one"] = plain(engine_of().fit(whole if rank else []))
    made["twice"] = plain(engine_of().fit(whole))
    for name, batches in {
        "fails": [{"price": torch.tensor([float("inf")])}] if rank else whole,
        "nothing": [],
    }.items():
        try:
            engine_of().fit(batches)
        except (ValueError, KeyError, ranks.RankError) as error:
            made[name] = f"{type(error).__name__}: {error}"
    try:
        features = [kv.Feature("price").normalise(), *([kv.Feature("p").normalise()] if rank else [])]
        kv.FeatureEngine(features).fit([])
    except ValueError as error:
        made["other features"] = str(error)
    ranks.disconnect()
    return made
