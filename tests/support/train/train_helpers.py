"""A small model with its data, and ways to look at everything that training changes."""

import json

import torch
from torch import nn

import karvan as kv


class Small(nn.Module):
    """Two tables and a net; dropout, so that random numbers matter."""

    def __init__(self, dropout=0.1, heads=None):
        super().__init__()
        self.embeddings = kv.EmbeddingEngine(
            {"user": kv.Table(4, init=kv.init.Normal(std=0.1)), "item": kv.Table(8)}
        )
        self.heads = heads
        self.net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Dropout(dropout))
        self.last = nn.Linear(16, len(heads or [0]))

    def forward(self, batch):
        out = self.embeddings(batch)
        hidden = self.net(torch.cat([out["user"], out["item"], out["price"].unsqueeze(1)], 1))
        logits = self.last(hidden)
        return (
            logits.squeeze(1) if self.heads is None else dict(zip(self.heads, logits.unbind(1), strict=True))
        )


def records(rows, seed=0):
    """Columns with something to learn."""
    random = torch.Generator().manual_seed(seed)
    user = torch.randint(40, (rows,), generator=random)
    item = torch.randint(60, (rows,), generator=random)
    price = torch.rand(rows, generator=random)
    chance = torch.sigmoid(((user * 7 + 3) % 11 - 5.0) * 0.5 + ((item * 5) % 7 - 3.0) * 0.4 + price)
    label = (torch.rand(rows, generator=random) < chance).float()
    return {"user": user, "item": item, "price": price, "label": label, "click": 1 - label}


def batches(count=12, size=16, seed=0):
    """A list of batches."""
    columns = records(count * size, seed)
    return [
        kv.Batch({name: column[i * size : (i + 1) * size] for name, column in columns.items()})
        for i in range(count)
    ]


def loader(rows=16 * 12, size=16, shuffle=32, epochs=1, seed=0):
    """A loader over the same kind of records."""
    columns = {name: column.numpy() for name, column in records(rows, seed).items()}
    return kv.data.read(columns, size, shuffle=shuffle, epochs=epochs, seed=3)


def model(**options):
    """The same model every time."""
    torch.manual_seed(7)
    return Small(**options)


def trainer(net=None, **options):
    """A quiet trainer of the small model."""
    net = net or model()
    given = {
        "loss": kv.losses.BinaryCrossEntropy(),
        "dense_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "sparse_optimizer": kv.optim.Adagrad(lr=0.1),
        "progress": "none",
    } | options
    return kv.Trainer(net, given.pop("loss"), **given)


def everything(net):
    """All numbers of a model, rows and their state included."""
    numbers = {name: value for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)}
    for module in net.modules():
        if isinstance(module, kv.EmbeddingEngine):
            for table in module.tables():
                rows = table.snapshot()
                for part, array in rows._asdict().items():
                    numbers[f"{table.name}.{part}"] = torch.from_numpy(array.copy())
    return numbers


def assert_same(one, other):
    """Two models, bit for bit."""
    one, other = everything(one), everything(other)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class StopAt(kv.callbacks.Callback):
    """Stops a fit at a step, if there is one."""

    def __init__(self, step=None):
        self.step = step

    def on_step_end(self, trainer, logs):
        if logs.step == self.step:
            trainer.stop("enough")


def contents(path):
    """All that a checkpoint says, apart from when it was made: its manifest has a checksum of every file."""
    manifest = json.loads((path / "manifest.json").read_text())
    return {name: value for name, value in manifest.items() if name not in ("checksum", "id", "created")}


def newest(folder):
    """The contents of a run's newest checkpoint, once they are known to be intact."""
    checkpoint = kv.Checkpoints(folder).latest()
    checkpoint.require_intact()
    return contents(checkpoint.path)
