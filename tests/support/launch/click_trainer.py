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


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        (notes / f"step-{os.getpid()}").write_text(f"{trainer.step} {trainer.connection.group.world_size}")
        if not (notes / "hurry").exists():
            time.sleep(pause)


trainer = kv.Trainer(
    kv.models.DLRM(
        numbers=["price", "recency"],
        ids=["user", "item", "category", "device", "hour", "history"],
        bottom=(16,),
        top=(32,),
    ),
    kv.losses.BinaryCrossEntropy(),
    dense_optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
    sparse_optimizer=kv.optim.Adagrad(lr=0.05),
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
