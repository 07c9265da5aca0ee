"""What the ranks do in `test_feature_ranks.py`: fits on shares of data, and errors of one rank."""

import logging
import os

import numpy as np
import torch

import karvan as kv
from karvan import distributed


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


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"city": kv.Table(2)})
        self.last = torch.nn.Linear(3, 1)

    def forward(self, batch):
        out = self.embeddings(batch)
        price = batch["price"].nan_to_num().unsqueeze(1)
        return self.last(torch.cat([out["city"], price], 1)).squeeze(1)


def train(engine, folder, steps, **more):
    """Train on shares of the data, transformed by an engine."""
    torch.manual_seed(0)
    trainer = kv.Trainer(
        Model(),
        kv.losses.BinaryCrossEntropy(),
        dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        sparse_optimizer=kv.optim.SGD(lr=0.1),
        checkpoints=folder,
        progress="none",
    )
    columns = {**records(), "label": (np.arange(1001) % 2).astype(np.float32), **more}
    return trainer.fit(kv.data.read(columns, 64, transform=engine), max_steps=steps)


def fit_shares(run_folder):
    own = int(os.environ["RANK"])
    before = engine_of().fit(kv.data.read(records(), 64, rank=own, world_size=2))  # this rank's share alone
    kv.connect("sharded", timeout=60)
    rank = distributed.current().rank
    made = {"even": plain(engine_of().fit(kv.data.read(records(), 64)))}
    whole = list(kv.data.read(records(), 100, rank=0, world_size=1))
    made["uneven"] = plain(engine_of().fit(whole[:2] if rank else whole[2:]))
    made["all on one"] = plain(engine_of().fit(whole if rank else []))
    made["twice"] = plain(engine_of().fit(whole))
    for name, batches in {
        "fails": [{"price": torch.tensor([float("inf")])}] if rank else whole,
        "nothing": [],
    }.items():
        try:
            engine_of().fit(batches)
        except (ValueError, KeyError, distributed.RankError) as error:
            made[name] = f"{type(error).__name__}: {error}"
    try:
        features = [kv.Feature("price").normalise(), *([kv.Feature("p").normalise()] if rank else [])]
        kv.FeatureEngine(features).fit([])
    except ValueError as error:
        made["other features"] = str(error)
    try:
        train(before, None, 2)
    except ValueError as error:
        made["fitted apart"] = str(error)
    try:
        train(None, None, 2, zip=["V3N4P"] * 1001 if rank else list(range(1001)))
    except ValueError as error:
        made["kinds apart"] = str(error)
    train(engine_of().fit(kv.data.read(records(), 64)), run_folder, 2)
    loaded = engine_of()
    train(loaded, run_folder, 4)
    made["resumed"] = plain(loaded)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("karvan.train").addHandler(handler)
    train(engine_of().fit(whole[:1]), run_folder, 6)
    made["replaced"] = [line for line in said if "other statistics" in line]
    logging.getLogger("karvan.train").removeHandler(handler)
    distributed.disconnect()
    return made
