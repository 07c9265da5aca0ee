"""`karvan bench`: what limits a training run on this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from typer import Option

from karvan.cli.output import (
    JSON_PATH,
    OK,
    CommandError,
    bytes_text,
    console,
    disk_rate,
    no_url,
    print_table,
    write_json,
)

_FEATURES, _NUMBERS, _DIM, _BATCH = 26, 13, 16, 4096  # the shape of Criteo's logs


@dataclass(frozen=True)
class Measured:
    """One part of training: how fast it runs alone, and a remark."""

    part: str
    rate: float
    unit: str
    remark: str = ""


def bench(
    quick: bool = Option(
        False, "--quick", help="Smaller tables and shorter runs: seconds instead of half a minute."
    ),
    folder: Path | None = Option(
        None, callback=no_url, help="Where files are read and written; by default a temporary folder."
    ),
    json_path: str | None = JSON_PATH,
) -> int:
    """Measure which part of training limits a run here.

    The shape is that of Criteo's logs: 26 ids of dim 16, 13 numbers, batches of 4096, and a DLRM.

    \b
    Examples:
      karvan bench --quick
      karvan bench --json bench.json
      karvan bench --folder /data/runs      # the disk that runs go to
    """
    if folder is not None and not folder.is_dir():
        raise CommandError(f"--folder expects a folder that exists, got '{folder}'.")
    with tempfile.TemporaryDirectory(prefix=".karvan-bench-", dir=folder) as scratch:
        results = measure_all(Path(scratch), quick=quick)
    training = [result for result in results if result.unit == "samples/s"]
    slowest = min(training, key=lambda result: result.rate)
    numbers = {"quick": quick, "limited_by": slowest.part, "parts": results}
    if not write_json(json_path, numbers):
        print_table(
            f"{len(os.sched_getaffinity(0))} cores; each part alone",
            ["part", "rate", "unit", ""],
            [[result.part, f"{result.rate:,.0f}", result.unit, result.remark] for result in results],
            right=["rate"],
        )
        console().print(
            f"A run here is limited by: {slowest.part}, {slowest.rate:,.0f} samples/s.", markup=False
        )
    return OK


def measure_all(folder: Path, *, quick: bool) -> list[Measured]:
    """All parts, one after the other."""
    import torch

    import karvan as kv

    seconds = 0.5 if quick else 3.0
    rows = 20_000 if quick else 500_000  # of each table
    names = [f"id_{number}" for number in range(_FEATURES)]
    numbers = [f"number_{number}" for number in range(_NUMBERS)]
    random = torch.Generator().manual_seed(0)
    batches = [_batch(names, numbers, rows, random) for _ in range(8)]

    engine = kv.EmbeddingEngine({name: kv.Table(_DIM) for name in names})
    optimizer = kv.optim.Adagrad(engine, lr=0.05)
    spread = 0x9E3779B97F4A7C15 - (1 << 64)  # any odd number: spreads neighbouring keys
    for first in range(0, rows, 1 << 16):
        keys = torch.arange(first, min(first + (1 << 16), rows)) * spread
        engine(kv.Batch(dict.fromkeys(names, keys)))
    gradients = [torch.full((_BATCH, _DIM), 1e-3)] * _FEATURES

    def sparse(number: int) -> None:
        vectors = engine(batches[number % len(batches)])
        torch.autograd.backward([vectors[name] for name in names], gradients)
        optimizer.step()

    model = kv.models.DLRM(numbers, names, dim=_DIM)
    parameters = list(model.parameters())
    dense_optimizer = torch.optim.Adam(parameters)
    loss = kv.losses.BinaryCrossEntropy()
    fixed = [torch.randn(_BATCH, _DIM, generator=random).requires_grad_() for _ in names]

    def dense(number: int) -> None:
        # The net alone: its vectors are constant, and gradients end at them.
        batch = batches[number % len(batches)]
        first = model.bottom(model.numbers(batch)) if model.bottom is not None else fixed[0]
        pairs = kv.models.pairwise_dots([first, *fixed], first)
        loss(model.top(pairs).squeeze(1), batch).backward()  # type: ignore[no-untyped-call]
        dense_optimizer.step()
        dense_optimizer.zero_grad()

    results: list[Measured] = []

    def add(part: str, rate: float, unit: str, remark: str) -> None:
        results.append(Measured(part, rate, unit, remark))

    remark = f"26 ids, {26 * rows:,} rows; look up, pool, backward, Adagrad"
    add("sparse step", _BATCH * _steps_per_second(sparse, seconds=seconds), "samples/s", remark)
    remark = f"DLRM's nets of {sum(p.numel() for p in parameters):,} parameters, Adam; a GPU is faster"
    add("dense step", _BATCH * _steps_per_second(dense, seconds=seconds), "samples/s", remark)
    count = 50_000 if quick else 500_000
    kv.data.synthetic.ClickLog(seed=0, users=10_000, items=10_000).write(folder / "log", count, files=2)

    def read() -> None:
        for _ in kv.data.read(str(folder / "log"), _BATCH):
            pass

    read()  # once, so that the files are in memory
    rate = count / min(_seconds_to(read) for _ in range(2))
    add("reading Parquet", rate, "samples/s", "11 columns, files in memory")
    size = sum(table.bytes for table in engine.tables())
    target = folder / "checkpoint"
    duration = _seconds_to(lambda: kv.checkpoint.save(target, {}, engine))
    written = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    disk = disk_rate(folder, min(max(written, 16 << 20), 256 << 20))
    remark = f"{bytes_text(written)} of {bytes_text(size)} tables; training continues"
    add("checkpoint", written / duration / 1e6, "MB/s", remark)
    add("disk", disk / 1e6, "MB/s", "written and flushed: what a checkpoint can reach")
    return results


def _batch(names: list[str], numbers: list[str], rows: int, random: Any) -> Any:
    import torch

    import karvan as kv

    spread = 0x9E3779B97F4A7C15 - (1 << 64)
    # About Zipf: small numbers are frequent.
    drawn = {
        name: (torch.rand(_BATCH, generator=random) * torch.tensor(float(rows)).log()).exp().long()
        for name in names
    }
    columns: dict[str, Any] = {name: ids.clamp(max=rows - 1) * spread for name, ids in drawn.items()}
    columns |= {name: torch.randn(_BATCH, generator=random) for name in numbers}
    columns["label"] = (torch.rand(_BATCH, generator=random) < 0.2).float()
    return kv.Batch(columns)


def _steps_per_second(step: Callable[[int], None], *, seconds: float, least: int = 5) -> float:
    """How often a step runs in a second, by the median of its times; the first two are not counted."""
    times: list[float] = []
    end = 0.0
    for number in cycle(range(1024)):
        begin = time.perf_counter()
        step(number)
        now = time.perf_counter()
        times.append(now - begin)
        if len(times) == 2:
            end = now + seconds
        if len(times) >= least + 2 and now > end:
            return 1 / median(times[2:])
    raise AssertionError("unreachable: the loop does not end")


def _seconds_to(run: Callable[[], object]) -> float:
    """How many seconds a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
