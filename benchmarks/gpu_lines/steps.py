"""Lines of whole steps of embeddings: lookup, backward and update through the public API.

The public dynamicemb benchmark's setting with the host's part of it, and 26 tables beside torch's own
embeddings.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import karvan as kv
from gpu_lines import fbgemm
from gpu_lines.device import power_law, take_turns
from gpu_lines.results import Wanted
from gpu_lines.run import Run

_QUEUED = 0.01  # seconds, more than the host takes to queue these steps
_STEPS_WITHOUT_WAIT = 2  # that the host can be ahead of the device, so that it never waits for it


class _Sink(torch.autograd.Function):
    """Ends a graph without any work: its backward returns gradients that exist already."""

    @staticmethod
    def forward(ctx, gradients, *outs):  # type: ignore[no-untyped-def]
        ctx.gradients = gradients
        return outs[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        return None, *ctx.gradients


class TrainStep:
    """Steps of lookup, backward and update, with gradients that exist already."""

    def __init__(
        self,
        engine: kv.EmbeddingEngine,
        optimizer: kv.optim.SparseOptimizer,
        batches: Sequence[dict[str, Tensor]],
    ) -> None:
        self.engine, self._optimizer, self.batches = engine, optimizer, batches
        first = next(iter(batches[0].values()))
        dims = [engine.table(name).dim for name in batches[0]]
        self._gradients = [torch.randn(len(first), dim, device=first.device) for dim in dims]

    def look_up(self, number: int) -> Tensor:
        """The lookup of a batch, as something to call backward on."""
        out = self.engine(self.batches[number % len(self.batches)])
        return _Sink.apply(self._gradients, *out.values())  # type: ignore[no-any-return, no-untyped-call]

    def update(self) -> None:
        """The update of the rows."""
        self._optimizer.step()

    def __call__(self, number: int) -> None:
        """The whole step of this number."""
        self.look_up(number).backward()
        self.update()


def least_bytes(dim: int, unique: int, positions: int, states: int) -> int:
    """Bytes that a step must move: vectors out, gradients in, rows read for both and written once.

    states: floats of optimizer state for each of a vector.
    """
    vector = 4 * dim
    return unique * vector + 2 * positions * vector + 2 * unique * (1 + states) * vector


def unique_keys(batches: Sequence[dict[str, Tensor]]) -> int:
    """Distinct keys of the first batch."""
    return sum(len(keys.unique()) for keys in batches[0].values())


def host_seconds(run: Run, step: TrainStep) -> dict[str, float]:
    """How long the program takes to queue each part of a step, while it does not wait for the device."""
    times: dict[str, list[float]] = {"look_up": [], "backward": [], "update": []}
    number = 0
    for _ in range(run.sizes.host_rounds):
        run.device.wait()
        for _ in range(_STEPS_WITHOUT_WAIT):
            begin = time.perf_counter()
            out = step.look_up(number)
            looked_up = time.perf_counter()
            out.backward()
            held = time.perf_counter()
            step.update()
            end = time.perf_counter()
            times["look_up"].append(looked_up - begin)
            times["backward"].append(held - looked_up)
            times["update"].append(end - held)
            number += 1
    run.device.wait()
    return {name: statistics.median(values) for name, values in times.items()}


def queued_seconds(run: Run, step: TrainStep) -> float:
    """The device's time of a step, which begins when all of it is queued."""
    device, times = run.device, []

    def work() -> None:
        for number in range(_STEPS_WITHOUT_WAIT):
            step(number)

    for _ in range(run.sizes.host_rounds):
        device.wait()
        device.sleep(_QUEUED)
        times.append(device.seconds(work) / _STEPS_WITHOUT_WAIT)
    return statistics.median(times)


def ten_tables(run: Run) -> None:
    """10 tables, dim 128, fp32, 1,048,570 lookups, unpooled, Adam: the public dynamicemb benchmark."""
    device, sizes, results = run.device, run.sizes, run.results
    source = device.random(0)
    names = [f"t{i}" for i in range(sizes.tables)]
    engine = device.engine({name: kv.Table(sizes.dim) for name in names})
    optimizer = kv.optim.Adam(engine, lr=0.01)
    batches = [
        {name: power_law(source, sizes.lookups, sizes.universe) for name in names} for _ in range(sizes.sets)
    ]
    for batch in batches:
        engine(batch)
    unique = unique_keys(batches)
    step = TrainStep(engine, optimizer, batches)
    candidates: dict[str, Callable[[int], None]] = {"karvan": step}
    if fbgemm.is_available(device):
        rows, mapped = fbgemm.rows_of(batches)
        candidates["fbgemm"] = fbgemm.train_step(rows, sizes.dim, mapped, "ADAM", pooled=False)
    times = take_turns(device, candidates, sizes.rounds, dict.fromkeys(candidates, sizes.steps))
    seconds = times["karvan"]
    bound = least_bytes(sizes.dim, unique, sizes.tables * sizes.lookups, states=2) / run.bandwidth
    share = bound / seconds
    results.add(
        "step_ms",
        f"step of {sizes.tables} tables, Adam, {unique:,} keys",
        seconds * 1e3,
        "ms",
        Wanted(0.78, True),
        share,
    )
    results.ratio("step_vs_bytes_bound", "  its bytes bound / its time", share, share=share)
    results.note(step_unique_keys=unique, step_bytes_bound_ms=bound * 1e3)
    if "fbgemm" in times:
        results.add("step_fbgemm_ms", "  FBGEMM, ids mapped to rows", times["fbgemm"] * 1e3, "ms")
        results.ratio("step_vs_fbgemm", "  FBGEMM / Karvan", times["fbgemm"] / seconds)
    parts = host_seconds(run, step)
    results.add("step_host_us", "  host's time to queue it", sum(parts.values()) * 1e6, "us")
    for name, found in parts.items():
        results.add(f"step_host_{name}_us", f"    {name.replace('_', ' ')}", found * 1e6, "us")

    queued = queued_seconds(run, step)
    results.add("step_device_ms", "  GPU's time for it", queued * 1e3, "ms", share=bound / queued)


def beside_embedding_bags(run: Run) -> None:
    """26 tables, dim 128, batch 65,536, Adagrad, in turn with EmbeddingBag(sparse=True), FBGEMM, TorchRec."""
    device, sizes, results = run.device, run.sizes, run.results
    source = device.random(1)
    names = [f"t{i}" for i in range(sizes.features)]
    batches = [
        {name: power_law(source, sizes.batch, sizes.bag_rows - 1, spread=1) for name in names}
        for _ in range(sizes.sets)
    ]
    unique = unique_keys(batches)
    engine = device.engine({name: kv.Table(sizes.dim) for name in names})
    mine = TrainStep(engine, kv.optim.Adagrad(engine, lr=0.01), batches)
    bags = nn.ModuleList(
        nn.EmbeddingBag(sizes.bag_rows, sizes.dim, mode="sum", sparse=True, device=device.device)
        for _ in names
    )
    bag_optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.01)
    gradients = [device.normal(sizes.batch, sizes.dim) for _ in names]
    offsets = torch.arange(sizes.batch, device=device.device)

    def theirs(number: int) -> None:
        batch = batches[number % sizes.sets]
        outs = [bag(batch[name], offsets) for bag, name in zip(bags, names, strict=True)]
        _Sink.apply(gradients, *outs).backward()  # type: ignore[no-untyped-call]
        bag_optimizer.step()
        bag_optimizer.zero_grad()

    candidates: dict[str, Callable[[int], None]] = {"karvan": mine, "bags": theirs}
    if fbgemm.is_available(device):
        candidates["fbgemm"] = fbgemm.train_step(
            sizes.bag_rows, sizes.dim, batches, "EXACT_ADAGRAD", pooled=True
        )
        candidates["torchrec"] = fbgemm.torchrec_step(sizes.bag_rows, sizes.dim, batches)
    steps = dict.fromkeys(candidates, sizes.steps) | {"bags": sizes.bag_steps}
    seconds = take_turns(device, candidates, sizes.rounds, steps)
    bound = least_bytes(sizes.dim, unique, sizes.features * sizes.batch, states=1) / run.bandwidth
    share = bound / seconds["karvan"]
    results.add(
        "w26_ms",
        f"step of {sizes.features} tables, Adagrad, {unique:,} keys",
        seconds["karvan"] * 1e3,
        "ms",
        share=share,
    )
    results.add(
        "w26_embedding_bags_ms",
        "  EmbeddingBag(sparse=True)",
        seconds["bags"] * 1e3,
        "ms",
        share=bound / seconds["bags"],
    )
    results.ratio(
        "w26_vs_embeddingbag", "  EmbeddingBag / Karvan", seconds["bags"] / seconds["karvan"], Wanted(15)
    )
    for name, label in (("fbgemm", "FBGEMM"), ("torchrec", "TorchRec")):
        if name in seconds:
            results.add(f"w26_{name}_ms", f"  {label}, ids mapped to rows", seconds[name] * 1e3, "ms")
            results.ratio(f"w26_vs_{name}", f"  {label} / Karvan", seconds[name] / seconds["karvan"])
    results.note(w26_unique_keys=unique)
