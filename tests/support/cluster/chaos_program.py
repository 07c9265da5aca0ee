"""A trainer of a launched job: python chaos_program.py DATA NOTES PAUSE.

It reads its data itself, or by loaders if the job has some. Every record has an id of its own. Its row begins
at 0, and every training of it adds 1 (with one trainer), so the final model knows how often it was trained on
each. The process notes how far it is, so that a test can kill it, and pauses after each step until there is a
note that says hurry.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import karvan as kv

data, notes = map(Path, sys.argv[1:3])
pause = float(sys.argv[3])
connection = kv.connect("remote", timeout=60)
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.records = kv.EmbeddingEngine({"record": kv.Table(1, init=kv.init.Constant(0.0))})
        self.users = kv.EmbeddingEngine({"user": kv.Table(4)})
        self.net = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return {
            "times": self.records(batch)["record"],
            "click": self.net(self.users(batch)["user"]).squeeze(1),
        }


def loss(output, batch):
    click = F.binary_cross_entropy_with_logits(output["click"], batch["label"])
    return {"times": -output["times"].sum(), "click": click}


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        time.sleep(0 if (notes / "hurry").exists() else pause)
        (notes / f"step-{connection.rank}").write_text(f"{os.getpid()} {trainer.step}")


model = Model()
trainer = kv.Trainer(
    model,
    loss,
    dense_optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    sparse_optimizer=kv.optim.SGD(lr=1.0),
    checkpoints=os.environ["KARVAN_CHECKPOINTS"],
    checkpoint_every=5,
    callbacks=[Note()],
    progress="none",
)
if int(os.environ["KARVAN_LOADER_COUNT"]):
    batches = kv.data.from_loaders(
        ids=["record", "user"] if int(os.environ["KARVAN_EMBEDDING_WORKER_COUNT"]) else [], timeout=60
    )
else:
    batches = kv.data.read(str(data / "*.parquet"), batch_size=16, shuffle=64, seed=3)
result = trainer.fit(batches)
stores = [engine.store for engine in (model.records, model.users)]
most, lost = max(store.window.most for store in stores), sum(store.lost_updates for store in stores)
(notes / f"done-{connection.rank}").write_text(f"{result.step} {most} {lost}")
