"""What the ranks do in `test_sharded.py`: the same steps in one process, or shared out over several."""

from dataclasses import replace

import numpy as np
import torch

import karvan as kv
from karvan import distributed
from karvan.ragged import IndexedRows

FEATURES = {
    "pooled": lambda: kv.Table(4, name="shared", combiner="sum"),
    "mean": lambda: kv.Table(4, name="shared", combiner="mean"),
    "sqrtn": lambda: kv.Table(8, combiner="sqrtn"),
    "sequence": lambda: kv.Table(3, combiner="sequence", length=3),
    "tile": lambda: kv.Table(2, combiner="tile", length=2),
    "ragged": lambda: kv.Table(5, combiner="ragged"),
    "index": lambda: kv.Table(4, name="shared", combiner="index", length=3),
}


def optimizer_of(name, engine):
    made = {
        "sgd": lambda: kv.optim.SGD(engine, lr=0.1),
        "momentum": lambda: kv.optim.SGD(engine, lr=0.1, momentum=0.9),
        "adagrad": lambda: kv.optim.Adagrad(engine, lr=0.1),
        "adam": lambda: kv.optim.Adam(engine, lr=0.05),
        "adamw": lambda: kv.optim.AdamW(engine, lr=0.05, weight_decay=0.1),
        "ftrl": lambda: kv.optim.FTRL(engine, lr=0.1),
    }
    return made[name]()


def global_batch(step, rows, keys=60):
    """Rows of ragged ids for every feature."""
    random = np.random.default_rng(step)
    batch = {}
    for name in FEATURES:
        lengths = random.integers(0, 5, rows)
        batch[name] = [random.integers(-keys, keys, n) * (1 << 40) + 7 for n in lengths]
    return batch


def sharded_keys():
    """Keys of which some have a row."""
    return torch.arange(-5, 5) * (1 << 40) + 7


def part_of(batch, rank, world):
    """A rank's share: consecutive rows."""
    made = {}
    for name, rows in batch.items():
        mine = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
        offsets = torch.tensor(np.concatenate([[0], np.cumsum([len(r) for r in mine])]), dtype=torch.int64)
        values = torch.tensor(np.concatenate([np.empty(0, np.int64), *mine]), dtype=torch.int64)
        made[name] = kv.Ragged(values, offsets)
    return kv.Batch(made)


def values_of(out):
    """The vectors of an output."""
    out = out.to_sequence() if isinstance(out, IndexedRows) else out
    return out if isinstance(out, torch.Tensor) else out.values


def loss_of(outputs, features, scale):
    """A sum that depends on every element in another way, divided by the number of rows of all ranks."""
    total = 0.0
    for number, name in enumerate(features):
        values = values_of(outputs[name])
        total = total + ((number + 1) * values + values**2).sum()
    return total * scale


def train_all(scenarios):
    """Several trainings, one after the other."""
    return [train(**scenario) for scenario in scenarios]


def train(
    optimizer="adagrad",
    dtype="float32",
    steps=6,
    rows=12,
    shared=True,
    unused=(),
    prepare=False,
    wire="float32",
    grad_reduce="mean",
    idle=False,
    admit=None,
    evict=None,
    capacity=None,
    passes=1,
    batches=None,
    servers=None,
    staleness=1,
):
    """Train some steps; returns this rank's rows of every table, outputs of an evaluation and counters."""
    if servers:
        connection = distributed.connect(
            "remote", servers=servers, staleness=staleness, wire=wire, grad_reduce=grad_reduce
        )
    elif shared:
        connection = distributed.connect("sharded", wire=wire, grad_reduce=grad_reduce, capacity=capacity)
    else:
        connection = distributed.current()
    rank, world = connection.rank, connection.world_size
    options = {"dtype": getattr(torch, dtype)}
    if admit:
        options["admit"] = kv.admission.MinCount(admit)
    if evict:
        options["evict"] = kv.eviction.LRU(evict)
    engine = kv.EmbeddingEngine({name: replace(make(), **options) for name, make in FEATURES.items()}, seed=3)
    sparse = optimizer_of(optimizer, engine)
    used = [name for name in FEATURES if name not in unused]
    for step in range(steps):
        for number in range(passes):
            whole = batches[step] if batches else global_batch(step * passes + number, rows)
            if idle and rank == world - 1:
                batch = part_of({name: [] for name in whole}, 0, 1)  # nothing to do
            else:
                batch = part_of(whole, rank, world - idle)
            if prepare:
                with connection.on("fit"):
                    assert engine.prepare(batch, training=True)
            # Gradients are averaged over ranks, so the whole batch's sum takes a factor of as many.
            loss_of(engine(batch), used, world if grad_reduce == "mean" else 1.0).backward()
        sparse.step()
    engine.eval()
    with torch.no_grad():
        outputs = engine(part_of(global_batch(0, rows), rank, world))
        outputs = {name: values_of(out) for name, out in outputs.items()}
    some = engine.table("shared").vectors(sharded_keys())
    tables = {table.name: tuple(table.snapshot()) for table in engine.tables()}
    stats = {table.name: table.stats() for table in engine.tables()}
    channels = {
        name: (channel.operations, channel.bytes_sent) for name, channel in connection.channels.items()
    }
    return {"tables": tables, "outputs": outputs, "stats": stats, "channels": channels, "some": some}


def initial(batch):
    """The rows of a batch's keys before any update."""
    engine = kv.EmbeddingEngine({name: make() for name, make in FEATURES.items()}, seed=3)
    engine(part_of(batch, 0, 1))
    return {"tables": {table.name: tuple(table.snapshot()) for table in engine.tables()}}
