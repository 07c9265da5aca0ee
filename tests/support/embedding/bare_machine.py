"""A program on a machine with only torch, triton and numpy: whatever else is imported is refused.

It imports Karvan's modules for embeddings and for steps of training, trains an engine on a store in plain
torch, and asks for what needs the native core. It prints the vectors that it has trained and the errors that
it got, as JSON.
"""

import importlib
import json
import pkgutil
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

ALLOWED = {"torch", "torchgen", "functorch", "triton", "numpy", "karvan", *sys.stdlib_module_names}
# What torch imports of its own dependencies.
ALLOWED |= {"typing_extensions", "sympy", "mpmath", "filelock", "networkx", "jinja2", "markupsafe"}
OWN = {path.stem for path in Path(__file__).parent.glob("*.py")}
NEEDS_ARROW = "karvan.store.remote."


class OnlyTorch:
    """Finds what is allowed, in files, and nothing else."""

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = top in ALLOWED | OWN or top.startswith("_sysconfigdata_")
        return PathFinder.find_spec(name, path, target) if allowed and name != "karvan._native" else None


def import_all():
    import karvan.embedding
    import karvan.store

    parts = ("distributed", "features", "ids", "metrics", "models", "threads")
    step = ("data_parallel", "device_placement", "losses", "optimizer_step", "precision", "step_routine")
    names = [f"karvan.{name}" for name in (*parts, *(f"train.{name}" for name in step))]
    for package in (karvan.store, karvan.embedding):
        names += [each.name for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in names:
        if not name.startswith(NEEDS_ARROW):
            importlib.import_module(name)


def train(store):
    """The vectors of two tables after a few steps of Adam."""
    import torch

    import karvan as kv

    start = kv.init.Constant(0.5)
    features = {
        "user": kv.Table(4, init=start),
        "item": kv.Table(3, init=start, combiner="mean"),
        "seen": kv.Table(3, "item", "ragged", init=start),
    }
    engine = kv.EmbeddingEngine(features, store=store)
    optimizer = kv.optim.Adam(engine, lr=0.1)
    for step in range(3):
        seen = kv.Ragged(torch.tensor([1, 1, 2]), torch.tensor([0, 2, 3]))
        ids = {"user": torch.tensor([step, 5]), "item": torch.tensor([[step, 1], [4, 4]]), "seen": seen}
        out = engine(kv.Batch(ids))
        loss = out["user"].square().sum() + out["item"].sum() + out["seen"].values.square().sum()
        loss.backward()
        optimizer.step()
    return {name: engine.table(name).vectors(range(6)).tolist() for name in ("user", "item")}


def errors():
    """What each call that needs the native core says."""
    import numpy as np
    import torch

    import karvan as kv
    from karvan.store import LookupProgram, MemoryStore, Rule, hashes_of

    spec = kv.Table(2).spec("t", 0, 4)
    calls = {
        "ShardedStore": lambda: sharded(spec),
        "MemoryStore": lambda: MemoryStore().add_table(spec),
        "EmbeddingEngine": lambda: kv.EmbeddingEngine({"t": kv.Table(2)}),
        "initial_vectors": lambda: spec.initial_vectors(np.arange(2)),
        "Rule": lambda: Rule("adam").native(),
        "LookupProgram": lambda: LookupProgram([]).native,
        "hashes_of": lambda: hashes_of(np.arange(2)),
        "ids": lambda: kv.ids.farm("text"),
        "hash_stack": lambda: kv.ids.hash_stack(torch.arange(2), 2, 10),
        "threads": lambda: kv.set_num_threads(1),
        "remote": lambda: kv.connect("remote", servers=["127.0.0.1:1"]),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ImportError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "no error"
    return found


def sharded(spec):
    """A table of ranks that communicate over the network, which needs no native core; its rows do."""
    import torch.distributed as dist

    import karvan as kv
    from karvan.store import ShardedStore

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ShardedStore(kv.connect("sharded")).add_table(spec)
    finally:
        kv.disconnect()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OnlyTorch()]
    import karvan as kv

    import_all()
    assert kv.connect("memory").settings.kind == "memory"
    kv.disconnect()
    for name in ("Batch", "EmbeddingEngine", "Ragged", "Table", "admission", "eviction", "init", "optim"):
        getattr(kv, name)
    from dict_store import DictStore

    print(json.dumps({"trained": train(DictStore()), "errors": errors()}))
