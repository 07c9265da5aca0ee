"""A trainer of a launched job that is killed: python counts_program.py DATA NOTES PAUSE.

Every record has an id of its own, and is seen once; `MinCount(2)` must not admit any of them.
"""

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
        self.all = kv.EmbeddingEngine(
            {
                "record": kv.Table(1, init=kv.init.Constant(0.0)),
                "once": kv.Table(1, name="once", admit=kv.admission.MinCount(2, slots=1 << 20)),
                "user": kv.Table(1),
            }
        )
        self.net = torch.nn.Linear(3, 1)

    def forward(self, batch):
        vectors = self.all({**batch, "once": batch["record"]})
        return self.net(torch.cat([vectors[name] for name in ("record", "once", "user")], 1)).squeeze(1)


def loss(output, batch):
    return torch.nn.functional.binary_cross_entropy_with_logits(output, batch["label"])


class Note(kv.callbacks.Callback):
    def on_step_end(self, trainer, logs):
        time.sleep(0 if (notes / "hurry").exists() else pause)
        (notes / f"step-{connection.rank}").write_text(f"{os.getpid()} {trainer.step}")


trainer = kv.Trainer(
    Model(),
    loss,
    dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    sparse_optimizer=kv.optim.SGD(lr=0.1),
    checkpoints=os.environ["KARVAN_CHECKPOINTS"],
    checkpoint_every=5,
    callbacks=[Note()],
    progress="none",
)
trainer.fit(kv.data.read(str(data / "*.parquet"), batch_size=16, shuffle=64, seed=3))
