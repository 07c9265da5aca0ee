"""What the ranks do in `test_sharded_cuda.py`: the same steps, with tables in memory or on devices."""

from dataclasses import replace

import numpy as np
import quick_interpreter  # noqa: F401, for ranks in Triton's interpreter
import torch
import torch.distributed as dist
import trainer_programs
from sharded_programs import loss_of, optimizer_of, part_of, values_of

import karvan as kv
from karvan import distributed
from karvan.embedding import HashStack
from karvan.store.cuda.sharded import ShardedCudaStore, make_transport
from karvan.store.cuda.store import CudaStore
from karvan.store.memory import MemoryStore
from karvan.train.optimizer_step import OptimizerStep, OptimizerStepSettings
from karvan.train.precision import Precision

FEATURES = {
    "pooled": lambda: kv.Table(4, name="shared", combiner="sum"),
    "mean": lambda: kv.Table(4, name="shared", combiner="mean"),
    "sqrtn": lambda: kv.Table(8, combiner="sqrtn"),
    "weighted": lambda: kv.Table(8, combiner="mean"),
    "sequence": lambda: kv.Table(3, combiner="sequence", length=3),
    "stack": lambda: kv.Table(4, combiner="sum", hash_stack=HashStack(rounds=2, size=20)),
    "ragged": lambda: kv.Table(5, combiner="ragged"),
    "single": lambda: kv.Table(4, combiner="sum"),
    "index": lambda: kv.Table(8, name="weighted", combiner="index"),
}


def global_batch(step, rows, keys=20):
    """Samples of ids for every feature; "single" has one id each."""
    random = np.random.default_rng(step)
    batch = {}
    for name in FEATURES:
        lengths = np.ones(rows, int) if name == "single" else random.integers(0, 5, rows)
        batch[name] = [random.integers(-keys, keys, n) * (1 << 40) + 7 for n in lengths]
    return batch


def share_of(whole, rank, world, device):
    """A rank's share of a batch; weights are made of the ids."""
    made = dict(part_of(whole, rank, world).items())
    ids = made["weighted"]
    made["weighted"] = kv.Ragged(ids.values, ids.offsets, (ids.values % 97).float() / 97 + 0.25)
    made["single"] = made["single"].values
    moved = {name: entry if device == "cpu" else entry.to(device) for name, entry in made.items()}
    return kv.Batch(moved)


def tables_of(features, admit=None, evict=None, dtype="float32"):
    """The tables of some features, or of all."""
    options = {"dtype": getattr(torch, dtype)}
    if admit:
        options["admit"] = kv.admission.MinCount(admit, slots=1 << 12)
    if evict:
        options["evict"] = kv.eviction.LRU(evict)
    return {name: replace(FEATURES[name](), **options) for name in features or FEATURES}


def train_all(scenarios, device="cpu"):
    """Several trainings, one after the other, of ranks that may share a GPU, which NCCL refuses."""
    dist.init_process_group("gloo")
    made = [train(device=device, **scenario) for scenario in scenarios]
    distributed.disconnect()
    dist.destroy_process_group()
    return made


def initial(batch):
    """The rows of a batch's keys before any update."""
    engine = kv.EmbeddingEngine(tables_of(None), seed=3, store=MemoryStore())
    engine(share_of(batch, 0, 1, "cpu"))
    return {"tables": {table.name: tuple(table.snapshot()) for table in engine.tables()}}


def train(
    device="cpu",
    optimizer="adagrad",
    steps=3,
    rows=6,
    shared=True,
    unused=(),
    unused_on=None,
    prepare=False,
    wire="float32",
    grad_reduce="mean",
    transport="auto",
    idle=False,
    uneven=False,
    features=None,
    passes=1,
    scale=1.0,
    seed=0,
    batches=None,
    save=None,
    load=None,
    dtype="float32",
    admit=None,
    evict=None,
):
    """Train some steps; returns this rank's rows of every table, outputs of an evaluation and counters.

    device: of the tables; None for tables in the memory of this process.
    """
    if shared:
        connection = distributed.connect(
            "sharded", wire=wire, grad_reduce=grad_reduce, timeout=100, transport=transport
        )
        store = ShardedCudaStore(connection, device)
    else:
        connection = distributed.current()
        store = MemoryStore() if device is None else CudaStore(device)
        device = device or "cpu"
    rank, world = connection.rank, connection.world_size
    engine = kv.EmbeddingEngine(tables_of(features, admit, evict, dtype), seed=3, store=store)
    sparse = optimizer_of(optimizer, engine)
    if load:
        kv.Checkpoints(load).latest().load(engine)
    engine.gradient_scale = scale
    used = [name for name in features or FEATURES if name not in unused]
    mine = [name for name in used if unused_on != rank or name not in ("mean", "sqrtn")]
    for step in range(steps):
        for number in range(passes):
            whole = batches[step] if batches else global_batch(seed + step * passes + number, rows)
            if idle and rank == world - 1:
                batch = share_of({name: [] for name in whole}, 0, 1, device)
            elif uneven and world == 2:
                cut = 1 if rank == 0 else rows
                first = 0 if rank == 0 else 1
                batch = share_of({k: v[first:cut] for k, v in whole.items()}, 0, 1, device)
            else:
                batch = share_of(whole, rank, world - idle, device)
            if prepare:
                with connection.on("fit"):
                    assert engine.prepare(batch, training=True)
            factor = world if grad_reduce == "mean" else 1.0
            loss_of(engine(batch), mine, factor * scale).backward()
        sparse.step()
    if save:
        kv.Checkpoints(save, part_bytes=600).save(1, {}, engine, block=True)
    engine.eval()
    with torch.no_grad():
        outputs = engine(share_of(global_batch(seed, rows), rank, world, device))
        outputs = {name: values_of(out).cpu() for name, out in outputs.items() if name in engine.features}
    some = engine.table("shared").vectors(torch.arange(-5, 5) * (1 << 40) + 7)
    tables = {table.name: tuple(table.snapshot()) for table in engine.tables()}
    stats = {table.name: table.stats() for table in engine.tables()}
    return {"tables": tables, "outputs": outputs, "stats": stats, "some": some}


def train_over_nccl(device, **options):
    """As `train`, and the transport of a store of these ranks."""
    made = train(device=device, **options)
    return made, type(make_transport(distributed.current(), torch.device(device))).__name__


def not_finite(device="cpu"):
    """A step in which one rank's gradient of one key is not finite; what it changes, and what ranks know."""
    connection = distributed.connect("sharded", timeout=100)
    store = ShardedCudaStore(connection, device)
    engine = kv.EmbeddingEngine({"user": kv.Table(4), "item": kv.Table(4)}, seed=3, store=store)
    sparse = kv.optim.SGD(engine, lr=0.1)
    users = torch.tensor([1, 2, 3, 4] if connection.rank == 0 else [3, 4, 5])
    out = engine({"user": users.to(device), "item": users.to(device)})
    before = {table.name: tuple(table.snapshot()) for table in engine.tables()}
    factors = torch.ones(len(users), 1)
    if connection.rank == 0:
        factors[2] = torch.inf
    (out["user"] * factors.to(device)).sum().backward()
    finite = sparse.gradients_finite()
    ((_, held),) = engine.gradients(engine.tables())
    flags = held.check_finite(), held.finite(), held.touched()
    sparse.step()
    after = {table.name: tuple(table.snapshot()) for table in engine.tables()}
    skipped = engine.table("user").stats()["skipped_updates"]
    return {"before": before, "after": after, "finite": finite, "flags": flags, "skipped": skipped}


def late_steps(device="cpu"):
    """Three steps, the second of which is not finite on rank 0; the rows after each, and what ranks know."""
    connection = distributed.connect("sharded", timeout=100)
    store = ShardedCudaStore(connection, device)
    engine = kv.EmbeddingEngine({"user": kv.Table(4)}, seed=3, store=store)
    update = OptimizerStep(None, kv.optim.Adam(engine, lr=0.1), OptimizerStepSettings(), Precision())
    users = torch.tensor([1, 2, 3, 4] if connection.rank == 0 else [3, 4, 5]).to(device)
    taken, rows = [], []
    for factor in (1.0, torch.inf, 1.0):
        out = engine({"user": users})["user"]
        update.backward(out.sum() * (factor if connection.rank == 0 else 1.0), 1)
        taken.append(bool(update.apply_late()))
        rows.append(tuple(engine.table("user").snapshot()))
    return {"taken": taken, "rows": rows}


class Net(trainer_programs.Net):
    """The model of `trainer_programs`, with its tables in a store."""

    def __init__(self, store):
        super().__init__()
        features = {
            "user": kv.Table(4, init=kv.init.Uniform(-0.1, 0.1)),
            "history": kv.Table(4, combiner="mean"),
        }
        self.embeddings = kv.EmbeddingEngine(features, store=store)


def fit(ranks, device="cpu", shared=True, epochs=1):
    """A fit with an evaluation, of the data of so many ranks.

    On a GPU feeds prepare batches on threads of their own. Triton's interpreter runs on one thread only.
    """
    store = MemoryStore()
    if shared:
        store = ShardedCudaStore(distributed.connect("sharded", timeout=100), device)
    net, prefetch = trainer_programs.net_of(lambda: Net(store)), 0 if device == "cpu" else 2
    trainer = trainer_programs.trainer_of(net, device=device, prefetch=prefetch)
    data, other = (trainer_programs.shares(ranks, seed=seed) for seed in (0, 1))
    made = trainer_programs.numbers_of(trainer, trainer.fit(data, epochs=epochs, eval_data=other))
    return made | {"dense": {name: value.cpu() for name, value in made["dense"].items()}}


def fit_over_gloo(**options):
    """As `fit`, by ranks that share a GPU: NCCL refuses that, so dense gradients go by gloo."""
    dist.init_process_group("gloo")
    made = fit(**options)
    distributed.disconnect()
    dist.destroy_process_group()
    return made
