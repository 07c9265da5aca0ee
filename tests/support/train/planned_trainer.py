"""A trainer whose steps have fixed batches: DATA CHECKPOINTS NOTES EPOCHS, as `elastic_trainer.py`.

With KARVAN_EMBEDDING_WORKER_COUNT above 0, embedding workers look its rows up. Its model has dropout, and
sums that depend on their order. The tensors of its last checkpoint are the result.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import karvan as kv

data, checkpoints, notes = map(Path, sys.argv[1:4])
epochs = int(sys.argv[4])
pause = float(os.environ.get("PAUSE", "0"))
rows = os.environ.get("ROWS") == "1"
workers = os.environ.get("KARVAN_EMBEDDING_WORKER_COUNT", "0") != "0"
kv.connect("remote" if rows else "sharded", timeout=60)
torch.manual_seed(7)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        width = 12 if rows else 4
        if rows:
            record = kv.Table(4, name="record", admit=kv.admission.MinCount(2))
            self.embeddings = kv.EmbeddingEngine({"id": record, "user": kv.Table(4)})
        self.net = torch.nn.Sequential(
            torch.nn.Linear(width, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )

    def forward(self, batch):
        number = batch["record"].long()
        inputs = torch.stack([torch.sin(number * factor) for factor in (0.1, 0.7, 1.3, 2.9)], 1)
        if rows:
            embedded = self.embeddings(batch if workers else {"id": batch["record"], "user": number % 37})
            inputs = torch.cat([inputs, embedded["id"], embedded["user"]], 1)
        return self.net(inputs).squeeze(1)


def loss(output, batch):
    return torch.nn.functional.mse_loss(output, torch.cos(batch["record"].float()))


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        (notes / f"step-{os.getpid()}").write_text(f"{trainer.step} {trainer.connection.group.world_size}")
        if not (notes / "hurry").exists():
            time.sleep(pause)


trainer = kv.Trainer(
    Model(),
    loss,
    dense_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    sparse_optimizer=kv.optim.Adam(lr=0.01) if rows else None,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9),
    checkpoints=checkpoints,
    checkpoint_every=int(os.environ.get("SAVE_EVERY", "1000")),
    metrics={
        "distance": kv.metrics.MeanAbsoluteError(label="record"),
        "weighted": kv.metrics.MeanSquaredError(label="record", weight="record"),
        "mean": kv.metrics.Mean(),
    },
    callbacks=[Note()],
    progress="plain",
)
if os.environ.get("KARVAN_LOADER_COUNT", "0") == "0":
    read = kv.data.read(str(data / "*.parquet"), batch_size=8, shuffle=64)
else:
    read = kv.data.from_loaders(ids=["id", "user"] if workers else None)
result = trainer.fit(read, epochs=epochs)
if result.stopped is None:
    written = notes / f"result-{os.getpid()}.new"
    written.write_text(
        json.dumps({"step": result.step, "samples": result.samples, "path": result.checkpoint})
    )
    written.rename(notes / f"result-{os.getpid()}")
