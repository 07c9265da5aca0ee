"""A trainer of a launched job that fails as it is told: python failing_trainer.py own|usage|data."""

import os
import sys

import torch
from torch.nn import functional as F

import karvan as kv

how = sys.argv[1]
connection = kv.connect("remote", timeout=60)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users = kv.EmbeddingEngine({"user": kv.Table(4)})
        self.net = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.net(self.users(batch)["user"]).squeeze(1)


class Fail(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        if how == "own" and connection.rank == 0 and logs.step == 5:
            raise ValueError("a mistake of mine")


trainer = kv.Trainer(
    Model(),
    lambda output, batch: F.binary_cross_entropy_with_logits(output, batch["label"]),
    dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    sparse_optimizer=kv.optim.SGD(lr=0.1),
    checkpoints=os.environ["KARVAN_CHECKPOINTS"],
    checkpoint_every=0 if how == "usage" else None,
    callbacks=[Fail()],
    progress="none",
)
columns = {"user": list(range(400)), "label": [0.0, 1.0] * 200}
data = kv.data.read("nowhere/*.parquet" if how == "data" else columns, batch_size=8)
trainer.fit(data)
