"""Kernels of tables on a GPU as their compiler sees them: it refuses much that the interpreter runs.

A training in the interpreter records every launch, with the types of its arguments; these are compiled for a
Hopper GPU, which is not needed for that. An argument of 1 is a constant for the compiler, as at run time.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

import karvan as kv
from karvan.embedding import HashStack
from karvan.store.cuda.store import CudaStore

_COMPILE = Path(__file__).parent.parent / "support" / "store" / "compile_launches.py"
_ASSEMBLER = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
_POINTERS = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves"),
    pytest.mark.skipif(not _ASSEMBLER.exists(), reason="triton has no assembler for NVIDIA's GPUs here"),
]


@pytest.fixture
def launches(monkeypatch):
    """The launches of kernels while it is used, as JSON texts."""
    recorded = set()
    real = interpreter.InterpretedFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if not self.fn.__module__.startswith("karvan.store."):  # others have a test of their own
            return real(self, *args, grid=grid, warmup=warmup, **kwargs)
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        signature, constants = {}, {}
        for name in self.arg_names:
            value = given[name]
            if name in self.fn.__annotations__ or (type(value) is int and value == 1):
                signature[name], constants[name] = "constexpr", getattr(value, "value", value)
            elif isinstance(value, torch.Tensor):
                signature[name] = _POINTERS[value.dtype]
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        options = {name: kwargs[name] for name in ("num_warps", "enable_fp_fusion") if name in kwargs}
        launch = [self.fn.__module__, self.fn.__name__, signature, constants, options]
        recorded.add(json.dumps(launch, sort_keys=True))
        return real(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    return recorded


def compiled(launches, folder):
    path = folder / "launches.json"
    path.write_text(f"[{', '.join(sorted(launches))}]")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [sys.executable, str(_COMPILE), str(path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-4000:]
    return set(done.stdout.split())


def ragged(rng, rows, most=4):
    lengths = rng.integers(0, most, rows)
    values = rng.integers(-50, 50, lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return kv.Ragged(torch.from_numpy(values), torch.from_numpy(offsets), torch.rand(len(values)))


TABLES = {
    "plain": kv.Table(8),
    "pooled": kv.Table(8, combiner="mean", init=kv.init.TruncatedNormal()),
    "padded": kv.Table(8, combiner="sequence", length=2, name="plain"),
    "stack": kv.Table(8, combiner="sum", hash_stack=HashStack(2, 20), init=kv.init.Gamma(0.5, 1.0)),
    "seldom": kv.Table(8, admit=kv.admission.MinCount(2, slots=1000)),
    "some": kv.Table(8, admit=kv.admission.Probability(0.5), evict=kv.eviction.Norm(1e-3, every=1)),
    "drawn": kv.Table(8, admit=kv.admission.Probability(0.5, each=True)),
    "half": kv.Table(5, dtype=torch.bfloat16),
    "short": kv.Table(5, dtype=torch.float16, evict=kv.eviction.LRU(capacity=20)),
}


def train(optimizer, steps, **options):
    """Some steps with all of a store's kernels, and maintenance."""
    rng = np.random.default_rng(0)
    store = CudaStore("cpu")
    engine = kv.EmbeddingEngine(TABLES, store=store)
    sparse = optimizer(engine, lr=0.1, **options)
    for step in range(steps):
        batch = {name: ragged(rng, 70) for name in ("pooled", "padded", "stack")}
        batch |= {
            name: torch.from_numpy(rng.integers(-90, 90, 70))
            for name in ("plain", "seldom", "some", "drawn", "half", "short")
        }
        batch["plain"][:] = torch.where(torch.arange(70) < 66, 7, batch["plain"])  # a long run
        for _ in range(1 + step % 2):
            out = engine(batch)
            sum(v.sum() if isinstance(v, torch.Tensor) else v.values.sum() for v in out.values()).backward()
        if step == 1:
            engine.table("plain").evict_keys([7])
        sparse.step()
    table = engine.table("plain")
    rows = table.snapshot()
    capture = store.capture(["plain", "half"], {"plain": 1, "half": 1})
    table.clear()
    table.load(rows)
    engine(batch)
    engine({**batch, "plain": torch.arange(70) * 3})["half"].sum().backward()
    sparse.step()
    for name in ("plain", "half"):
        capture.part(name, 0)
    capture.close()
    return store


def test_every_kernel_of_tables_compiles_for_hopper(launches, tmp_path):
    train(kv.optim.Adam, 3, clip_norm=1.0, weight_bound=1.0)
    made = compiled(launches, tmp_path)
    assert made >= {
        "copy_rows",
        "gather_rows",
        "insert_admitted",
        "copy_vectors",
        "count_nominees",
        "decide_nominees",
        "describe_cells",
        "describe_runs",
        "drop_runs",
        "erase_places",
        "find_places",
        "find_rows",
        "finish_inserts",
        "insert_keys",
        "list_slots",
        "move_slots",
        "nominate_keys",
        "pool_vectors",
        "read_fields",
        "read_vectors",
        "save_rows",
        "sum_pieces",
        "update_rows",
        "write_rows",
        "write_runs",
    }


def test_kernels_of_the_host_tier_compile_for_hopper(launches, tmp_path):
    """Also all others, where each row has an address of its own."""
    engine = kv.EmbeddingEngine(
        {"plain": kv.Table(8), "half": kv.Table(5, dtype=torch.bfloat16)}, store=CudaStore("cpu", 4000)
    )
    sparse = kv.optim.Adam(engine, lr=0.1)
    batches = [{name: torch.arange(n, n + 150) for name in engine.features} for n in range(3)]
    for batch in batches:
        engine.prepare(batch, training=True)
    for batch in batches:
        sum(out.sum() for out in engine(batch).values()).backward()
        sparse.step()
    stats = engine.table("plain").stats()
    assert stats["host_bytes"] > 0
    assert stats["tier_exchanges"] > 0
    made = compiled(launches, tmp_path)
    assert made >= {"collect_rows", "choose_places", "swap_rows", "count_places", "find_rows", "update_rows"}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (kv.optim.SGD, {}),
        (kv.optim.SGD, {"momentum": 0.9}),
        (kv.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (kv.optim.Adam, {"amsgrad": True}),
        (kv.optim.Adagrad, {}),
        (kv.optim.Adagrad, {"row_wise": True}),
        (kv.optim.AdamW, {}),
        (kv.optim.FTRL, {}),
    ],
)
def test_every_rule_compiles_for_hopper(launches, tmp_path, optimizer, options):
    train(optimizer, 1, **options)
    updates = {launch for launch in launches if json.loads(launch)[1] == "update_rows"}
    assert compiled(updates, tmp_path) == {"update_rows"}
