"""A trainer of a launched job whose servers are killed: python reload_program.py DATA NOTES PAUSE.

Every record has an id of its own, whose row begins at 0 and grows by the same amount whenever the record is
trained. The program notes the records of each step, and at the end how many updates it was told are lost.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import karvan as kv

data, notes = map(Path, sys.argv[1:3])
pause = float(sys.argv[3])
connection = kv.connect("remote", timeout=120)
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.records = kv.EmbeddingEngine({"record": kv.Table(1, init=kv.init.Constant(0.0))})
        self.net = torch.nn.Linear(1, 1)

    def forward(self, batch):
        times = self.records(batch)["record"]
        return {"times": times, "click": self.net(times.detach()).squeeze(1)}


def loss(output, batch):
    with (notes / f"batches-{connection.rank}").open("a") as file:
        file.write(json.dumps(batch["label"].to(torch.int64).tolist()) + "\n")
    return {"times": -output["times"].sum(), "click": output["click"].square().mean()}


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        time.sleep(0 if (notes / "hurry").exists() else pause)
        (notes / f"step-{connection.rank}").write_text(f"{os.getpid()} {trainer.step}")


model = Model()
trainer = kv.Trainer(
    model,
    loss,
    dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    sparse_optimizer=kv.optim.SGD(lr=float(connection.world_size)),
    checkpoints=os.environ["KARVAN_CHECKPOINTS"],
    checkpoint_every=3,
    callbacks=[Note()],
    progress="none",
)
if int(os.environ["KARVAN_LOADER_COUNT"]):
    batches = kv.data.from_loaders(
        ids=["record"] if int(os.environ["KARVAN_EMBEDDING_WORKER_COUNT"]) else [], timeout=120
    )
else:
    batches = kv.data.read(str(data / "*.parquet"), batch_size=16, shuffle=64, seed=3)
result = trainer.fit(batches)
(notes / f"done-{connection.rank}").write_text(f"{result.step} {model.records.store.lost_updates}")
