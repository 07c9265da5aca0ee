"""Bit for bit the same training, whatever the number of threads and of internal shards."""

import random

import pytest
import reference as ref
import torch

import karvan as kv

SPLITS = [(threads, shards) for threads in (1, 2, 4) for shards in (1, 2, 16, 64, 256)]
QUICK = [(1, 2), (1, 256), (2, 1), (2, 16), (4, 2), (4, 64)]  # threads and internal shards
KEYS = [*range(200), -1, -(2**63), 2**63 - 1]


def zipf_rows(source, batch, longest):
    """Rows of ids in which the first keys come often."""
    skewed = lambda: KEYS[min(int(source.paretovariate(0.4)) - 1, len(KEYS) - 1)]  # noqa: E731
    return [[skewed() for _ in range(source.randrange(longest + 1))] for _ in range(batch)]


def batches(steps, batch, longest, names):
    source = random.Random(5)
    result = []
    for _ in range(steps):
        rows = {name: zipf_rows(source, batch, longest) for name in names}
        weights = {name: [[source.random() for _ in row] for row in rows[name]] for name in names}
        result.append(
            {name: kv.Ragged.from_lists(rows[name], weights[name] if "w" in name else None) for name in names}
        )
    return result


def tables():
    small = {f"w {d}": kv.Table(5, combiner="mean", dtype=d) for d in ref.DTYPES}
    return small | {
        "shared w": kv.Table(5, name="w torch.float32", combiner="sqrtn"),
        "lru": kv.Table(8, combiner="sum", evict=kv.eviction.LRU(capacity=30)),
        "lfu": kv.Table(
            3, combiner="sequence", evict=kv.eviction.LFU(capacity=30), init=kv.init.Normal(0.0, 1.0)
        ),
        "rare": kv.Table(4, combiner="ragged", admit=kv.admission.MinCount(3)),
        "some": kv.Table(4, combiner="tile", length=3, admit=kv.admission.Probability(0.5)),
    }


def run(optimizer, threads, shards, data):
    """Train, and tell everything that can be seen from outside, as a flat dict of tensors."""
    kv.set_num_threads(threads)
    engine = kv.EmbeddingEngine(tables(), seed=11, shards=shards)
    names = [name for name in tables() if name != "shared w"]
    versions = {name: engine.table(name).version for name in names}
    cls, options = ref.OPTIMIZERS[optimizer]
    opt = getattr(kv.optim, cls)(engine, **options)
    seen = {}
    generator = torch.Generator().manual_seed(3)
    for step, batch in enumerate(data):
        loss = torch.zeros(())
        for name, output in engine(batch).items():
            values = output if isinstance(output, torch.Tensor) else output.values
            seen[f"output {name} {step}"] = values.detach().clone()
            loss = loss + (values * torch.randn(values.shape, generator=generator)).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        for name in names:
            engine.table(name).evict()
    for name in names:
        handle = engine.table(name)
        seen |= {f"{part} of {name}": tensor for part, tensor in ref.sort_rows(handle.snapshot()).items()}
        seen[f"evicted of {name}"] = handle.evicted_since(versions[name]).sort().values
        counted = {k: v for k, v in handle.stats().items() if k not in ("bytes", "moved")}
        seen[f"stats of {name}"] = torch.tensor([counted[k] for k in sorted(counted)])
    return seen


def assert_identical(received, expected):
    assert received.keys() == expected.keys()
    for what, tensor in expected.items():
        # as bytes, so that 0.0 and -0.0 differ and NaN equals itself
        same = received[what].shape == tensor.shape and torch.equal(
            received[what].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        )
        assert same, what


@pytest.mark.parametrize("splits", [QUICK, pytest.param(SPLITS, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("optimizer", ref.OPTIMIZERS)
def test_threads_and_shards_change_no_bit(optimizer, splits):
    data = batches(steps=4, batch=24, longest=4, names=list(tables()))
    expected = run(optimizer, 1, 1, data)
    assert expected["evicted of lru"].numel()
    assert expected["evicted of lfu"].numel()
    for threads, shards in splits:
        assert_identical(run(optimizer, threads, shards, data), expected)


def test_large_batches_change_no_bit():
    """Large enough for the work to be split among threads."""
    data = batches(steps=2, batch=4000, longest=8, names=list(tables()))
    expected = run("adagrad", 1, 1, data)
    for threads in (1, 2, 4):
        for shards in (1, 16, 256):
            assert_identical(run("adagrad", threads, shards, data), expected)


def test_the_same_run_twice_is_the_same():
    data = batches(steps=3, batch=24, longest=4, names=list(tables()))
    assert_identical(run("adam", 2, 16, data), run("adam", 2, 16, data))
