"""Tables on a GPU: lookups and updates beside the bytes they must move, and beside torch's own embeddings.

Builds, checks and times everything in one run, on one GPU. It needs torch, triton and numpy, and Karvan's
source: neither its native core nor its other dependencies.

    python benchmarks/gpu.py --quick
    python benchmarks/gpu.py --json out/gpu.json
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from common import Report, parser
from torch import Tensor, nn

import karvan as kv

TABLES, LOOKUPS, DIM = 10, 104_857, 128  # of the public dynamicemb benchmark: 1,048,570 lookups
UNIVERSE = 20_000_000  # keys of a table, of which a batch has some 43,000
FEATURES, BATCH = 26, 65_536
SETS = 4  # different batches, so that none is in the cache


def main() -> None:
    """Run everything."""
    options = parser(str(__doc__)).parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py expects a GPU, and torch finds none here: see karvan doctor.")
    report = Report("gpu", options.quick)
    report.figures["gpu"] = torch.cuda.get_device_name()
    rounds = 2 if options.quick else 5
    kv.connect("cuda")
    check()
    bandwidth = copy_bandwidth()
    report.figures["copy_TB_per_s"] = bandwidth / 1e12
    for load in (0.5, 0.75):
        free()
        for name, rate in index_rates(load).items():
            report.figures[f"{name}_at_{load}_G_per_s"] = rate / 1e9
    for part in (step_of_ten_tables, step_beside_embedding_bags, dlrm):
        free()
        part(report, bandwidth, rounds)
    report.finish()
    report.show()
    report.write(options.json)


def power_law(rng: np.random.Generator, count: int, keys: int, exponent: float = 1.05) -> Tensor:
    """Keys from 1 on, the k-th with a probability of about k ** -exponent, spread over 64 bits."""
    drawn = ((keys ** (1 - exponent) - 1) * rng.random(count) + 1) ** (1 / (1 - exponent))
    return torch.from_numpy(drawn.astype(np.int64) * 7919).cuda()


class _Sink(torch.autograd.Function):
    """Ends a graph without any work: its backward returns gradients that exist already."""

    @staticmethod
    def forward(ctx, gradients, *outs):  # type: ignore[no-untyped-def]
        ctx.gradients = gradients
        return outs[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        return None, *ctx.gradients


def seconds_of(step: Callable[[int], None], rounds: int, steps: int = 40) -> float:
    """The median time of a step, by the wall clock, over rounds of steps."""
    times = []
    for _ in range(rounds):
        for i in range(SETS + 2):
            step(i)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(steps):
            step(i)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / steps)
    return float(np.median(times))


def free() -> None:
    """Release what is not used any more."""
    gc.collect()
    torch.cuda.empty_cache()


def check() -> None:
    """Train two tables for some steps beside a dense reference in double precision; raises if they differ."""
    keys, dim, lr = 500, 20, 0.1
    engine = kv.EmbeddingEngine({"one": kv.Table(dim), "many": kv.Table(dim, combiner="mean")}, seed=3)
    optimizer = kv.optim.Adagrad(engine, lr=lr)
    every = torch.arange(keys).cuda()
    first = engine({"one": every, "many": kv.Ragged(every, torch.arange(keys + 1).cuda())})
    rows = {name: out.detach().double().requires_grad_() for name, out in first.items()}
    sums = {name: torch.zeros_like(vectors) for name, vectors in rows.items()}
    for _ in range(5):
        one = torch.randint(0, keys, (3000,)).cuda()
        offsets = torch.cat(
            [torch.zeros(1, dtype=torch.int64), torch.randint(0, 5, (3000,)).cumsum(0)]
        ).cuda()
        many = torch.randint(0, keys, (int(offsets[-1]),)).cuda()
        out = engine({"one": one, "many": kv.Ragged(many, offsets)})
        lengths = offsets.diff()
        sample = torch.repeat_interleave(torch.arange(3000).cuda(), lengths)
        pooled = torch.zeros(3000, dim, dtype=torch.float64).cuda().index_add(0, sample, rows["many"][many])
        expected = {"one": rows["one"][one], "many": pooled / lengths.clamp(min=1)[:, None]}
        weights = torch.randn(3000, dim).cuda()
        for name, vectors in out.items():
            torch.testing.assert_close(vectors.double(), expected[name], rtol=1e-4, atol=1e-5)
        sum((vectors * weights).sum() for vectors in out.values()).backward()
        sum((vectors * weights).sum() for vectors in expected.values()).backward()
        optimizer.step()
        with torch.no_grad():
            for name, vectors in rows.items():
                gradient = vectors.grad
                assert gradient is not None
                sums[name] += gradient**2
                vectors -= lr * gradient / (sums[name].sqrt() + 1e-10)
                vectors.grad = None


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    size = 2 * source.numel() * source.element_size()
    return size / min(times)


def index_rates(load: float, slots: int = 1 << 24, queries: int = 1 << 22) -> dict[str, float]:
    """Keys per second that are found, found or inserted, and inserted, in an index of that load."""
    from karvan.store.cuda.batch import lookup as launches
    from karvan.store.cuda.batch.batch_ids import FeatureIds, GroupLayout, shape_of_keys
    from karvan.store.cuda.batch.buffers import LookupBuffers
    from karvan.store.cuda.rows.index import KeyIndex

    engine = kv.EmbeddingEngine({"a": kv.Table(4)})
    memory = engine.store.memory  # type: ignore[attr-defined]
    table = memory.tables["a"]
    table.index = KeyIndex(memory.device, slots, load=0.95)
    part = 1 << 20
    keys = torch.randint(-(2**62), 2**62, (int(slots * load),)).cuda()

    def lookup_of(some: Tensor, training: bool) -> LookupBuffers:
        layout = GroupLayout(table.arena, [(0, shape_of_keys(0, table, len(some)))], training)
        buffers = LookupBuffers(memory, table.arena, layout.shape)
        buffers.load(layout, layout.describe([FeatureIds(some)], layout.outputs(memory.device)), 1)
        return buffers

    def insert(some: Tensor) -> LookupBuffers:
        table.next_version()
        memory.reserve(table.arena, {table: len(some)})
        memory.note_lookup({table: len(some)})
        buffers = lookup_of(some, True)
        launches.find(buffers, grows=False)
        launches.insert(buffers)
        memory.counters.request_if_idle()
        return buffers

    for first in range(0, len(keys), part):
        insert(keys[first : first + part])
    asked = keys[torch.randint(0, len(keys), (queries,)).cuda()]
    found, present = lookup_of(asked, False), lookup_of(asked, True)

    def find_or_insert() -> None:
        launches.find(present, grows=False)
        launches.insert(present)

    rates = {
        "find": queries / _graph_seconds(lambda: launches.find(found, grows=False)),
        "find_or_insert": queries / _graph_seconds(find_or_insert),
    }
    fresh = torch.randint(-(2**62), 2**62, (part,)).cuda()
    memory.reserve(table.arena, {table: part})
    memory.note_lookup({table: part})
    buffers = lookup_of(fresh, True)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # so that both launches are queued before the first begins
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launches.find(buffers, grows=False)
    launches.insert(buffers)
    end.record()
    torch.cuda.synchronize()
    rates["insert"] = part / (begin.elapsed_time(end) / 1e3)
    assert engine.table("a").rows >= len(keys)
    return rates


def _graph_seconds(work: Callable[[], None], times: int = 10) -> float:
    """The time of some work on the device, without that of its launches."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def train_step(
    engine: kv.EmbeddingEngine, optimizer: kv.optim.SparseOptimizer, batches: Sequence[dict[str, Tensor]]
) -> Callable[[int], None]:
    """A step of lookup, backward and update, with gradients that exist already."""
    size = len(next(iter(batches[0].values())))
    gradients = [torch.randn(size, DIM, device="cuda") for _ in batches[0]]

    def step(i: int) -> None:
        out = engine(batches[i % len(batches)])
        _Sink.apply(gradients, *out.values()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def least_bytes(unique: int, positions: int, row: int) -> int:
    """Bytes that a step must move: vectors out, gradients in, rows read for both and written once."""
    vector = 4 * DIM
    return unique * vector + 2 * positions * vector + 2 * unique * row


def step_of_ten_tables(report: Report, bandwidth: float, rounds: int) -> None:
    """10 tables, dim 128, fp32, 1,048,570 lookups, unpooled, Adam: the public dynamicemb benchmark."""
    rng = np.random.default_rng(0)
    engine = kv.EmbeddingEngine({f"t{i}": kv.Table(DIM) for i in range(TABLES)})
    optimizer = kv.optim.Adam(engine, lr=0.01)
    batches = [{f"t{i}": power_law(rng, LOOKUPS, UNIVERSE) for i in range(TABLES)} for _ in range(SETS)]
    for batch in batches:
        engine(batch)
    unique = sum(len(keys.unique()) for keys in batches[0].values())
    seconds = seconds_of(train_step(engine, optimizer, batches), rounds)
    bound = least_bytes(unique, TABLES * LOOKUPS, 12 * DIM) / bandwidth
    report.figures["step_unique_keys"] = unique
    report.figures["step_ms"] = seconds * 1e3
    report.figures["step_bytes_bound_ms"] = bound * 1e3
    report.ratios["step_vs_bytes_bound"] = bound / seconds


def step_beside_embedding_bags(report: Report, bandwidth: float, rounds: int) -> None:
    """26 tables, dim 128, batch 65,536, Adagrad, fp32, beside torch.nn.EmbeddingBag(sparse=True)."""
    rng = np.random.default_rng(1)
    rows = 1_000_000
    names = [f"t{i}" for i in range(FEATURES)]
    batches = [{name: power_law(rng, BATCH, rows - 1) // 7919 for name in names} for _ in range(SETS)]
    unique = sum(len(keys.unique()) for keys in batches[0].values())
    engine = kv.EmbeddingEngine({name: kv.Table(DIM) for name in names})
    mine = train_step(engine, kv.optim.Adagrad(engine, lr=0.01), batches)
    bags = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, device="cuda") for _ in names)
    bag_optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.01)
    gradients = [torch.randn(BATCH, DIM, device="cuda") for _ in names]
    offsets = torch.arange(BATCH, device="cuda")

    def theirs(i: int) -> None:
        batch = batches[i % SETS]
        outs = [bag(batch[name], offsets) for bag, name in zip(bags, names, strict=True)]
        _Sink.apply(gradients, *outs).backward()  # type: ignore[no-untyped-call]
        bag_optimizer.step()
        bag_optimizer.zero_grad()

    seconds = seconds_of(mine, rounds)
    seconds_bags = seconds_of(theirs, 1, steps=5)
    seconds = min(seconds, seconds_of(mine, rounds))
    bound = least_bytes(unique, FEATURES * BATCH, 8 * DIM) / bandwidth
    report.figures |= {
        "w26_unique_keys": unique,
        "w26_ms": seconds * 1e3,
        "w26_share_of_bytes_bound": bound / seconds,
        "w26_embedding_bags_ms": seconds_bags * 1e3,
    }
    report.ratios["w26_vs_embeddingbag"] = seconds_bags / seconds


def dlrm(report: Report, bandwidth: float, rounds: int) -> None:
    """DLRM of the Criteo-1TB shape, batch 65,536, bf16, with the input on the GPU."""
    rng = np.random.default_rng(2)
    names = [f"c{i}" for i in range(FEATURES)]
    numbers = [f"i{i}" for i in range(13)]
    model = kv.models.DLRM(
        numbers, names, DIM, bottom=(512, 256), top=(1024, 1024, 512, 256), table=kv.Table(DIM)
    ).cuda()
    sparse = kv.optim.Adagrad(model.embeddings, lr=0.01)
    dense = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    batches = []
    for _ in range(SETS):
        batch = {name: power_law(rng, BATCH, 4_000_000) for name in names}
        batch |= {name: torch.rand(BATCH, device="cuda") for name in numbers}
        batches.append((kv.Batch(batch), torch.randint(0, 2, (BATCH,), device="cuda").float()))

    def step(i: int) -> None:
        batch, labels = batches[i % SETS]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        loss.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()

    seconds = seconds_of(step, rounds, steps=20)
    report.figures["dlrm_ms"] = seconds * 1e3
    report.figures["dlrm_M_samples_per_s"] = BATCH / seconds / 1e6


if __name__ == "__main__":
    main()
