"""A trainer that makes one step of SGD with a linear model: DATA CHECKPOINTS NOTES EPOCHS.

It notes how many batches it computed, and ends with the weights.
"""

import json
import os
import sys
from pathlib import Path

import torch

import karvan as kv

data, checkpoints, notes = map(Path, sys.argv[1:4])
kv.connect("sharded", timeout=60)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.batches = 0

    def forward(self, batch):
        self.batches += self.training
        number = batch["record"].double()
        return torch.stack([number, torch.sin(number)], 1) @ self.weight


def loss(output, batch):
    return torch.nn.functional.mse_loss(output, torch.cos(batch["record"].double()))


model = Model()
trainer = kv.Trainer(
    model,
    loss,
    dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    checkpoints=checkpoints,
    progress="none",
)
result = trainer.fit(kv.data.read(str(data / "*.parquet"), batch_size=8), epochs=1)
written = notes / f"result-{os.getpid()}.new"
found = {"step": result.step, "batches": model.batches, "weight": model.weight.tolist()}
written.write_text(json.dumps(found))
written.rename(notes / f"result-{os.getpid()}")
