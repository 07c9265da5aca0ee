"""Lines of the host tier: tables of four times the rows that fit on the GPU, beside tables that are there.

Keys are drawn by a power law over all rows, new ones in every step, and the next batch is prepared during a
step, as a Trainer does. All rows exist before, inserted in random order, and steps are timed once the hot
rows have had time to arrive on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import karvan as kv
from gpu_lines import correctness
from gpu_lines.device import WARM, power_law, take_turns
from gpu_lines.results import Wanted
from gpu_lines.run import Run
from gpu_lines.steps import TrainStep, least_bytes, unique_keys

_FILLED = 1 << 18  # keys of all tables that are inserted at once
_SPREAD = 7919  # between keys


class PreparedStep:
    """Steps that prepare the next batch before their own lookup, through all batches one after the other."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._number = 0

    def __call__(self, _: int = 0) -> None:
        """The next step."""
        engine, batches = self._step.engine, self._step.batches
        assert engine.prepare(batches[(self._number + 1) % len(batches)], training=True)
        self._step(self._number)
        self._number += 1


def host_tier(run: Run) -> None:
    """One table of 8 M rows, then 26 tables, Adagrad, batch 65,536, power law 1.05."""
    sizes = run.sizes
    share_of_rows = correctness.row_bytes(sizes.tier_checked) // sizes.tier_share
    correctness.check(run.device, sizes.tier_checked, share_of_rows)
    ratio, share = _compare(run, "tier", "1 table", 1, sizes.tier_rows, sizes.tier_batches)
    run.results.ratio(
        "host_tier_vs_device", "  of the rate with all rows on the GPU", ratio, Wanted(0.5), share
    )
    if sizes.tier_table_rows:
        run.device.release()
        ratio, _ = _compare(
            run,
            "tier26",
            f"{sizes.features} tables",
            sizes.features,
            sizes.tier_table_rows,
            sizes.tier_table_batches,
        )
        run.results.add("tier26_vs_device", "  of the rate with all rows on the GPU", ratio, "x")


def _compare(run: Run, key: str, what: str, tables: int, rows: int, batch_count: int) -> tuple[float, float]:
    """Add the rates with rows in both places and all on the device; the ratio, and the bytes bound's share.

    rows: of each table.
    """
    device, sizes = run.device, run.sizes
    names = [f"t{i}" for i in range(tables)]
    source = device.random(5)
    batches = [
        {name: power_law(source, sizes.batch, rows, spread=_SPREAD) for name in names}
        for _ in range(batch_count)
    ]
    limit = tables * rows * 2 * 4 * sizes.dim // sizes.tier_share
    engines = {}
    steps = {}
    for name, memory in (("device", None), ("tier", limit)):
        engines[name] = device.engine({table: kv.Table(sizes.dim) for table in names}, memory)
        optimizer = kv.optim.Adagrad(engines[name], lr=0.01)
        _fill(engines[name], source, names, rows)
        steps[name] = PreparedStep(TrainStep(engines[name], optimizer, batches))
    for _ in range(sizes.tier_warm):
        steps["tier"]()
    before = _stats(engines["tier"])
    seconds = take_turns(device, steps, sizes.rounds, dict.fromkeys(steps, sizes.steps))
    after = _stats(engines["tier"])
    hits, misses, exchanges = (
        after[name] - before[name] for name in ("tier_hits", "tier_misses", "tier_exchanges")
    )
    made = sizes.rounds * (sizes.steps + min(WARM, sizes.steps))
    unique = unique_keys(batches)
    on_device = least_bytes(sizes.dim, unique, tables * sizes.batch, states=1) / run.bandwidth
    brought = exchanges / made * 2 * 4 * sizes.dim / run.upload_bandwidth  # both directions at once
    bounds = {"device": on_device, "tier": max(on_device, brought)}
    titles = {"device": f"{what}, all rows on the GPU", "tier": f"{what}, a quarter of its rows there"}
    for name, found in seconds.items():
        run.results.add(
            f"{key}_{name}_M_samples_per_s",
            titles[name],
            sizes.batch / found / 1e6,
            "M samples/s",
            share=bounds[name] / found,
        )
    run.results.add(
        f"{key}_hit_rate", "  rows that lookups met on the GPU", hits / max(1, hits + misses), "of all"
    )
    run.results.note(
        **{
            f"{key}_rows": tables * rows,
            f"{key}_unique_keys": unique,
            f"{key}_device_MB": after["device_bytes"] / 1e6,
            f"{key}_host_MB": after["host_bytes"] / 1e6,
            f"{key}_misses_per_step": misses / made,
            f"{key}_exchanges_per_step": exchanges / made,
        }
    )
    return seconds["device"] / seconds["tier"], bounds["tier"] / seconds["tier"]


def _fill(engine: kv.EmbeddingEngine, source: torch.Generator, names: Sequence[str], rows: int) -> None:
    """Give every key its row, in random order."""
    keys = (torch.randperm(rows, generator=source, device=source.device) + 1) * _SPREAD
    for some in keys.split(max(1, _FILLED // len(names))):
        engine(dict.fromkeys(names, some))


def _stats(engine: kv.EmbeddingEngine) -> Mapping[str, int]:
    """The sums of all tables' counters."""
    each = [table.stats() for table in engine.tables()]
    return {name: sum(stats[name] for stats in each) for name in each[0]}
