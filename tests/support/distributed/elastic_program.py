"""A training job under torchrun: python elastic_program.py DATA CHECKPOINTS NOTES PAUSE.

Every record has an id of its own, so the table of ids knows how often the model has trained on each. Each
process notes that it runs, with its number among ranks, so that a test can kill it. It pauses after each step
until there is a note that says hurry.
"""

import os
import sys
import time
from pathlib import Path

import torch

import karvan as kv

data, checkpoints, notes = map(Path, sys.argv[1:4])
pause = float(sys.argv[4])
connection = kv.connect("sharded", timeout=20)
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine({"record": kv.Table(4), "user": kv.Table(4)})
        self.net = torch.nn.Linear(8, 1)

    def forward(self, batch):
        embedded = self.embeddings(batch)
        return self.net(torch.cat([embedded["record"], embedded["user"]], 1)).squeeze(1)


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        time.sleep(0 if (notes / "hurry").exists() else pause)
        name = f"{connection.world_size}-{connection.rank}-{os.getpid()}"
        (notes / name).write_text(str(trainer.step))


trainer = kv.Trainer(
    Model(),
    kv.losses.BinaryCrossEntropy(),
    dense_optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    sparse_optimizer=kv.optim.Adagrad(lr=0.05),
    checkpoints=checkpoints,
    checkpoint_every=5,
    callbacks=[Note()],
    progress="none",
)
result = trainer.fit(kv.data.read(str(data / "*.parquet"), batch_size=16, shuffle=64, seed=3))
if connection.rank == 0:
    (notes / "done").write_text(f"{result.step} {result.samples}")
