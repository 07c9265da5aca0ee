"""One full sparse step through karvan's public API, beside FBGEMM on the CPU, TorchRec and plain torch.

A step is: lookup with insert, pool, backward from fixed gradients, Adagrad fp32. Karvan gets 64-bit keys and
hashes them; the peers get ids already mapped to rows. All candidates are interleaved in one run, their
medians compared; karvan runs on all cores, a peer counts with its better figure of one thread and all cores.

growth steps of w1's shape at 8 M rows in which every tenth key is new: the worst beside the median
w1     26 single-valued features, batch 4096, dim 16, Zipf(1.05), 20 M rows
w2     two ragged features, batch 1024, mean length 200, dim 32, 10 M rows, sum-pooled and unpooled
scale  one table, dim 16, uniform keys: time per key at 50 M rows over time per key at 1 M
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from itertools import cycle, islice

import numpy as np
import numpy.typing as npt
import torch
from common import Report, cores, interleave, medians, parser, release, resident, scramble, thread_counts
from limits import ROWS_PER_PASS, Probe
from peers import LEARNING_RATE, Fbgemm, TorchBags, TorchRec, require_fbgemm
from workload import Ids, Shape, make_batches

import karvan as kv

PARTS = ("growth", "w1", "w2", "scale")


class Karvan:
    """An engine with one table per feature, its optimizer, and the batches it is trained with."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.names = [f"f{i}" for i in range(shape.features)]
        combiner = "sum" if shape.pooled else "ragged"
        self.engine = kv.EmbeddingEngine(
            {name: kv.Table(shape.dim, combiner=combiner) for name in self.names}
        )
        self.optimizer = kv.optim.Adagrad(self.engine, lr=LEARNING_RATE)

    def fill(self, chunk: int) -> list[float]:
        """Insert every row through training lookups, `chunk` keys per table and step; return the seconds."""
        set_threads(cores())
        times = []
        for start in range(0, self.shape.table_rows, chunk):
            ids = np.arange(start, min(start + chunk, self.shape.table_rows))
            keys = [torch.from_numpy(scramble(ids, i)) for i in range(self.shape.features)]
            batch = kv.Batch(dict(zip(self.names, keys, strict=True)))
            begin = time.perf_counter()
            self.engine(batch)
            times.append(time.perf_counter() - begin)
        rows = sum(handle.rows for handle in self.tables())
        if rows != self.shape.rows:
            raise RuntimeError(f"The fill should leave {self.shape.rows} rows, but the tables hold {rows}.")
        return times

    def tables(self) -> list:
        """Return the handles of all tables."""
        return [self.engine.table(name) for name in self.names]

    def bytes(self) -> int:
        """Return the memory of all tables."""
        return sum(handle.bytes for handle in self.tables())

    def look_up(self, ids: Ids) -> None:
        """Run a training lookup whose gradient never comes."""
        self.engine(self._batch(ids))

    def settle(self, batches: list[Ids]) -> None:
        """Look batches up until every index that was growing when the fill ended has its new size."""
        moved = -1
        for ids in cycle(batches):
            self.look_up(ids)
            before, moved = moved, sum(handle.stats()["moved"] for handle in self.tables())
            if moved == before:
                break

    def stepper(self, batches: list[Ids]) -> Callable[[], None]:
        """Return a function that runs one step on the next batch."""
        ready = cycle([(self._batch(ids), ids.gradients) for ids in batches])

        def step() -> None:
            batch, gradients = next(ready)
            outputs = self.engine(batch).values()
            torch.autograd.backward([out if self.shape.pooled else out.values for out in outputs], gradients)
            self.optimizer.step()

        return step

    def _batch(self, ids: Ids) -> kv.Batch:
        entries = {}
        for i, name in enumerate(self.names):
            keys = torch.from_numpy(scramble(ids.values[i], i))
            entries[name] = keys if self.shape.single else kv.Ragged(keys, torch.from_numpy(ids.offsets[i]))
        return kv.Batch(entries)


def set_threads(threads: int) -> None:
    """Let torch and karvan use this many threads, if they do not already."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if kv.get_num_threads() != threads:
        kv.set_num_threads(threads)


def on_threads(
    name: str, stepper: Callable[[], Callable[[], None]]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a candidate for each thread count; the change of threads falls into its untimed step."""

    def candidate(threads: int) -> Callable[[], None]:
        step = stepper()

        def run() -> None:
            set_threads(threads)
            step()

        return run

    for threads in thread_counts():
        yield f"{name}_{threads}t", candidate(threads)


def record(report: Report, part: str, shape: Shape, seconds: dict[str, float]) -> None:
    """Add each candidate's timing to the report, and what threads bring karvan."""
    for name, each in seconds.items():
        report.add_timing(f"{part}_{name}", each, shape.batch)
    report.figures[f"{part}_karvan_speedup_of_threads"] = seconds["karvan_1t"] / seconds[f"karvan_{cores()}t"]


def record_batches(report: Report, part: str, shape: Shape, batches: list[Ids]) -> float:
    """Add the sizes of a workload to the figures; return the mean count of unique rows per batch."""
    unique = statistics.mean(ids.unique() for ids in batches)
    report.figures[f"{part}_rows"] = shape.rows
    report.figures[f"{part}_ids_per_batch"] = statistics.mean(ids.count for ids in batches)
    report.figures[f"{part}_unique_per_batch"] = unique
    return unique


def record_fill(report: Report, part: str, shape: Shape, times: list[float]) -> None:
    """Add the insertion rate to the figures, and how the worst step compares: growth must not pause."""
    median = statistics.median(times)
    report.figures[f"{part}_inserted_rows_per_s"] = shape.rows / sum(times)
    report.figures[f"{part}_fill_median_step_ms"] = median * 1e3
    report.figures[f"{part}_fill_worst_step_ms"] = max(times) * 1e3
    report.figures[f"{part}_fill_worst_vs_median_step"] = max(times) / median


def speedup(seconds: dict[str, float], peer: str) -> float:
    """Return the peer's better time over karvan's time on all cores."""
    return min(seconds[f"{peer}_{threads}t"] for threads in thread_counts()) / seconds[f"karvan_{cores()}t"]


def w1(report: Report) -> None:
    """Single-valued features: against FBGEMM, TorchRec, torch and the machine's limit; memory per row."""
    shape = Shape(features=26, table_rows=(4 if report.quick else 20) * 10**6 // 26, batch=4096, dim=16)
    batches = make_batches(shape, count=12)
    unique = record_batches(report, "w1", shape, batches)

    release()
    before = resident()
    karvan = Karvan(shape)
    record_fill(report, "w1", shape, karvan.fill(chunk=shape.batch))
    report.figures["w1_row_bytes_while_the_index_may_grow"] = karvan.bytes() / shape.rows
    karvan.settle(batches)
    release()
    grown = resident() - before
    row_bytes = karvan.bytes() / shape.rows
    own = shape.dim * 4 * 2  # the vector and Adagrad's state
    report.ratios["row_bytes_vs_own"] = row_bytes / own
    report.figures["w1_row_bytes"] = row_bytes
    report.figures["w1_row_bytes_by_rss"] = grown / shape.rows
    report.figures["w1_row_bytes_vs_own_with_count_and_last_step"] = row_bytes / (own + 8)

    fbgemm, bags, torchrec = Fbgemm(shape, batches), TorchBags(shape, batches), TorchRec(shape, batches)
    with Probe(report.quick) as probe:
        limits = {f"limit_update128_{threads}t": probe.update(threads) for threads in thread_counts()}
        candidates = {
            **dict(on_threads("karvan", lambda: karvan.stepper(batches))),
            **dict(on_threads("fbgemm", fbgemm.stepper)),
            **dict(on_threads("torchrec", torchrec.stepper)),
            **dict(on_threads("torch", bags.stepper)),
            **limits,
        }
        seconds = medians(interleave(candidates, rounds=5 if report.quick else 15))
    rates = {name: int(name.split("_")[-1][:-1]) * ROWS_PER_PASS / seconds.pop(name) for name in limits}
    record(report, "w1", shape, seconds)
    report.figures |= {f"{name}_rows_per_s": rate for name, rate in rates.items()}

    limit = 2 * unique / rates[f"limit_update128_{cores()}t"]  # one pass forward, one backward
    report.figures["w1_limit_ms"] = limit * 1e3
    report.ratios["w1_vs_fbgemm"] = speedup(seconds, "fbgemm")
    report.ratios["w1_vs_torchrec"] = speedup(seconds, "torchrec")
    report.ratios["w1_vs_torch"] = speedup(seconds, "torch")
    report.ratios["w1_vs_limit"] = limit / seconds[f"karvan_{cores()}t"]


def w2(report: Report, pooled: bool) -> None:
    """Ragged features, pooled or not, against FBGEMM."""
    part = "w2_pooled" if pooled else "w2_unpooled"
    table_rows = (1 if report.quick else 5) * 10**6
    shape = Shape(features=2, table_rows=table_rows, batch=1024, dim=32, lengths=(100, 300), pooled=pooled)
    batches = make_batches(shape, count=8)
    record_batches(report, part, shape, batches)
    karvan = Karvan(shape)
    record_fill(report, part, shape, karvan.fill(chunk=65536))
    karvan.settle(batches)
    fbgemm = Fbgemm(shape, batches)
    candidates = {
        **dict(on_threads("karvan", lambda: karvan.stepper(batches))),
        **dict(on_threads("fbgemm", fbgemm.stepper)),
    }
    # FBGEMM's unpooled step takes half a second.
    rounds, burst = (10, 3) if pooled else (5, 3)
    seconds = medians(interleave(candidates, rounds=3 if report.quick else rounds, burst=burst))
    record(report, part, shape, seconds)
    report.ratios[f"{part}_vs_fbgemm"] = speedup(seconds, "fbgemm")


def scale(report: Report) -> None:
    """Time per key of a step over present keys, in a small and in a large table."""
    batch = 131072
    candidates = {}
    sizes = {"1m": 10**6, "5m": 5 * 10**6} if report.quick else {"1m": 10**6, "50m": 50 * 10**6}
    rng = np.random.default_rng(0)
    gradients = [torch.randn(batch, 16, generator=torch.Generator().manual_seed(0))]
    for name, rows in sizes.items():
        shape = Shape(features=1, table_rows=rows, batch=batch, dim=16)
        karvan = Karvan(shape)
        record_fill(report, f"scale_{name}", shape, karvan.fill(chunk=batch))
        offsets = [np.arange(batch + 1)]
        batches = [Ids([rng.integers(rows, size=batch)], offsets, gradients) for _ in range(12)]
        karvan.settle(batches)
        candidates[name] = karvan.stepper(batches)
    set_threads(cores())
    seconds = medians(interleave(candidates, rounds=5 if report.quick else 12))
    for name, each in seconds.items():
        report.figures[f"scale_{name}_per_key_ns"] = each / batch * 1e9
    small, large = seconds
    report.ratios["per_key_50m_vs_1m"] = seconds[large] / seconds[small]
    if report.quick:
        report.figures["per_key_5m_vs_1m_stands_for_50m_because_quick"] = seconds[large] / seconds[small]


def growth(report: Report) -> None:
    """Training that meets new keys all the time: no step may pause for the tables to grow.

    The same steps are run twice, from empty tables on, and each counts with its better time: growth comes
    back in the same step, what else the machine does in between does not.
    """
    shape = Shape(features=26, table_rows=(2 if report.quick else 8) * 10**6 // 26, batch=4096, dim=16)
    steps = 100 if report.quick else 500
    times = np.minimum(*(_growing_steps(shape, steps) for _ in range(2)))[5:]  # the first ones fill buffers
    median = float(np.median(times))
    report.figures["growth_median_step_ms"] = median * 1e3
    report.figures["growth_worst_step_ms"] = times.max() * 1e3
    report.figures["growth_worst_vs_median_step"] = times.max() / median
    report.figures["growth_steps_above_2_medians"] = int((times > 2 * median).sum())


def _growing_steps(shape: Shape, steps: int) -> npt.NDArray[np.float64]:
    """Return the seconds of steps in which every tenth key is new."""
    release()
    karvan = Karvan(shape)
    karvan.fill(chunk=shape.batch)
    rng = np.random.default_rng(5)
    fresh, times = shape.table_rows, []
    for ids in islice(cycle(make_batches(shape, count=12)), steps):
        for values in ids.values:
            new = rng.random(shape.batch) < 0.1
            values[new] = fresh + np.arange(new.sum())
            fresh += int(new.sum())
        step = karvan.stepper([ids])
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return np.array(times)


def _parts(text: str) -> list[str]:
    """Read the value of --only."""
    parts = text.split(",")
    if not set(parts) <= set(PARTS):
        raise ArgumentTypeError(f"expected some of {','.join(PARTS)}, but got {text}.")
    return parts


def main() -> None:
    """Run the parts asked for, print the tables and write the JSON."""
    arguments = parser((__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", type=_parts, default=list(PARTS), metavar="PARTS", help=",".join(PARTS))
    args = arguments.parse_args()
    report = Report("sparse_step", args.quick)
    runs = {
        "w1": [lambda: w1(report)],
        "w2": [lambda: w2(report, pooled=True), lambda: w2(report, pooled=False)],
        "scale": [lambda: scale(report)],
        "growth": [lambda: growth(report)],
    }
    if {"w1", "w2"} & set(args.only):
        require_fbgemm()
    for part in args.only:
        for run in runs[part]:
            start = time.perf_counter()
            run()
            release()  # the next one needs the memory
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    report.finish()
    if args.json != "-":
        report.show()
    report.write(args.json)


if __name__ == "__main__":
    main()
