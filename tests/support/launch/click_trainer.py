"""A trainer of an elastic job that learns a synthetic click log: DATA CHECKPOINTS NOTES EPOCHS.

PAUSE: seconds after each step, until there is a note that says hurry. Its result has the AUC of files that it
has not trained on, and the path of the checkpoint.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import karvan as kv

data, checkpoints, notes = map(Path, sys.argv[1:4])
epochs, pause = int(sys.argv[4]), float(os.environ.get("PAUSE", "0"))
kv.connect("remote", timeout=60)
torch.manual_seed(0)
features = kv.FeatureEngine([kv.Feature("price").log1p(), kv.Feature("recency").log1p()])


IDS = ["user", "item", "category", "device", "hour"]


class Linear(torch.nn.Module):
    """A weight for each id and number: what it learns hardly depends on the number of samples in a step."""

    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({name: kv.Table(1, init=kv.init.Constant(0.0)) for name in IDS})
        self.numbers = torch.nn.Linear(2, 1)

    def forward(self, batch):
        weights = self.embeddings({name: batch[name] for name in IDS})
        numbers = torch.stack([batch["price"].float(), batch["recency"].float()], 1)
        return sum(weights[name].squeeze(1) for name in IDS) + self.numbers(numbers).squeeze(1)


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        (notes / f"step-{os.getpid()}").write_text(f"{trainer.step} {trainer.connection.group.world_size}")
        if not (notes / "hurry").exists():
            time.sleep(pause)


trainer = kv.Trainer(
    Linear(),
    kv.losses.BinaryCrossEntropy(),
    dense_optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    sparse_optimizer=kv.optim.Adagrad(lr=0.1),
    metrics={"auc": kv.metrics.AUC()},
    checkpoints=checkpoints,
    checkpoint_every=500,
    callbacks=[Note()],
    progress="plain",
)
read = kv.data.read(str(data / "part-0000[0-5].parquet"), batch_size=64, transform=features)
test = kv.data.read(str(data / "part-0000[67].parquet"), batch_size=4096, transform=features)
result = trainer.fit(read, epochs=epochs, eval_data=test)
if result.stopped is None:
    written = notes / f"result-{os.getpid()}.new"
    written.write_text(json.dumps({"auc": result.evaluation["auc"], "path": result.checkpoint}))
    written.rename(notes / f"result-{os.getpid()}")
