"""Short trainings whose numbers are the same on every CPU, and digests of all that they leave behind.

The dense part rounds vectors and weights to multiples of 1/64 and computes in float64. All of its sums are
exact, so neither their order nor fused instructions matter. Rows are trained by the core, whose arithmetic
has no fused instructions. Digests leave out what differs each time: see `_UNSTABLE`.

As a program it is a trainer of an elastic job: DATA CHECKPOINTS NOTES EPOCHS; or a loader, without arguments.
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import rich.style  # noqa: F401  its import draws from Python's generator, whose state checkpoints have
import torch

import karvan as kv
from karvan import distributed

OPTIMIZERS = {
    "adagrad": lambda: kv.optim.Adagrad(lr=0.125),
    "adam": lambda: kv.optim.Adam(lr=0.0625),
    "ftrl": lambda: kv.optim.FTRL(lr=0.125),
}
WIDTH = 4 + 4 + 3 * 4 + 8
# Of a manifest: its checksum and name, when it was written, the version, and which run has trained it.
_UNSTABLE = ("checksum", "id", "created", "karvan", "run")


class Net(torch.nn.Module):
    """Admission, eviction, sequences, means and stochastic rounding; the sum of all elements, weighted."""

    def __init__(self, store=None):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {
                "user": kv.Table(4, admit=kv.admission.MinCount(5, slots=1024)),
                "item": kv.Table(4, combiner="mean", evict=kv.eviction.LRU(capacity=24)),
                "page": kv.Table(4, combiner="sequence", length=3),
                "word": kv.Table(8, dtype=torch.bfloat16, evict=kv.eviction.Age(steps=3, every=2)),
            },
            seed=5,
            store=store,
        )
        self.weights = torch.nn.Parameter((torch.arange(WIDTH) % 7 - 3.0) / 8)

    def forward(self, batch):
        out = self.embeddings(batch)
        parts = [out["user"], out["item"], out["page"].values.flatten(1), out["word"]]
        return (_rounded(torch.cat(parts, 1)) * _rounded(self.weights)).sum(1)


def _rounded(numbers):
    """Multiples of 1/64; gradients go through."""
    numbers = numbers.double()
    return numbers + ((numbers * 64).round() / 64 - numbers).detach()


class Loss:
    """The mean squared error; remembers its values."""

    def __init__(self):
        self.values = []

    def __call__(self, output, batch):
        loss = (output.double() - batch["label"].double()).square().sum() / max(1, len(output))
        self.values.append(loss.item())
        return loss


def columns(records=192):
    """Records of all features."""
    number = np.arange(records)
    return {
        "user": number * number % 97,
        "item": [[(n * 5 + k) % 47 for k in range(n % 4)] for n in range(records)],
        "page": [[(n * 11 + k * 3) % 29 for k in range(n % 5)] for n in range(records)],
        "word": number * number % 37,
        "label": (number % 3 == 0).astype(np.float32),
    }


def loader(**options):
    """The records in an order of their own; each rank reads its share."""
    return kv.data.read(columns(), 16, shuffle=32, seed=3, split_records=8, **options)


def batches():
    """The same records in order, as batches in memory."""
    ragged = ("item", "page")
    return [
        kv.Batch(
            {
                name: kv.Ragged.from_lists(column[first : first + 16])
                if name in ragged
                else torch.as_tensor(column[first : first + 16])
                for name, column in columns().items()
            }
        )
        for first in range(0, 192, 16)
    ]


def _dense(parameters):
    return torch.optim.SGD(parameters, lr=2**-6, momentum=0.5)


def _seed():
    """Checkpoints have the states of these generators."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def fit(folder, optimizer="adagrad", data=None, epochs=2, half=9, store=None, **options):
    """A fit with a full checkpoint in its middle and a delta at its end; its digests."""
    _seed()
    loss, data = Loss(), loader() if data is None else data
    trainer = kv.Trainer(
        Net(store),
        loss,
        dense_optimizer=_dense,
        sparse_optimizer=OPTIMIZERS[optimizer](),
        progress="none",
        checkpoints=kv.Checkpoints(folder, full_every=2),
        checkpoint_seconds=None,
        **options,
    )
    if half is not None:
        trainer.fit(data, epochs=epochs, max_steps=half)
    trainer.fit(data, epochs=epochs)
    return left_behind(loss, trainer.model, folder)


def loop(folder, optimizer="adagrad", data=None):
    """A loop in a TrainContext, saved at its end; its digests."""
    _seed()
    loss, data = Loss(), loader() if data is None else data
    with kv.TrainContext(Net(), dense_optimizer=_dense, sparse_optimizer=OPTIMIZERS[optimizer]()) as context:
        for _ in range(context.epoch, 2):
            for batch in context.loader(data):
                output, _ = context.forward(batch)
                context.backward(loss(output, batch))
        context.save(folder)
    return left_behind(loss, context.model, folder)


def on_rank(way, run, **options):
    """A fit or a loop of one of several ranks."""
    torch.set_num_threads(1)
    kv.connect("sharded", timeout=60)
    made = {"fit": fit, "loop": loop}[way](run, **options)
    distributed.disconnect()
    return made


def left_behind(loss, model, folder):
    """Digests of losses, of the rows of each table, and of each file of the checkpoints."""
    rows = {}
    for table in model.embeddings.tables():
        found = table.snapshot()
        order = found.keys.argsort()
        rows[table.name] = digest(*(np.ascontiguousarray(array[order]) for array in found))
    return {
        "losses": digest(json.dumps(loss.values).encode()),
        "rows": rows,
        "weights": digest(*(p.detach().numpy() for p in model.parameters())),
        "files": files(folder),
    }


def files(folder):
    """A digest of each file of the checkpoints in a folder."""
    folder = Path(folder)
    return {
        str(path.relative_to(folder)): digest(_stable(path))
        for path in sorted(folder.glob("step-*/**/*"))
        if path.is_file()
    }


def _stable(path):
    if path.name != "manifest.json":
        return path.read_bytes()
    content = json.loads(path.read_text(), object_hook=_without_end)
    updates = [each for table in content["tables"].values() for each in table["updates"]]
    for record in (content, content["base"] or {}, *updates):
        for name in _UNSTABLE:
            record.pop(name, None)
    return json.dumps(content).encode()


def _without_end(state):
    """A loader's part of a position has the end of the epoch if it has come, which is a matter of time."""
    return {**state, "end": None} if {"begin", "taken", "end", "next"} <= set(state) else state


def digest(*parts):
    """The first half of the sha256 of arrays or bytes."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()[:32]


def serve():
    """Be a loader."""
    with kv.LoaderContext(queue=2) as data:
        data.serve(data.read(columns(), 16, shuffle=32, seed=3, split_records=8))


def train(data, checkpoints, notes, epochs):
    """Be a trainer of an elastic job, whose steps have fixed batches."""
    kv.connect("remote", timeout=60)
    os.chdir(data)  # checkpoints have the paths of files as they are given
    data = kv.data.read("*.parquet", 16)
    made = fit(checkpoints, data=data, epochs=int(epochs), half=None)
    written = Path(notes) / f".new-{os.getpid()}"
    written.write_text(json.dumps(made))
    written.rename(Path(notes) / f"result-{os.getpid()}")  # whoever waits for it reads all of it


if __name__ == "__main__":
    train(*sys.argv[1:]) if sys.argv[1:] else serve()
