"""Lines of a lookup's parts: find and insert keys, and copy their vectors beside a plain copy.

These parts have no public API of their own, so the lines use the launches that lookups are made of.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import karvan as kv
from gpu_lines.device import power_law
from gpu_lines.results import Wanted
from gpu_lines.run import Run

_SECTOR = 32  # bytes that the least access to device memory brings


class Lookup:
    """A lookup of plain ids that can be launched part by part."""

    def __init__(self, engine: kv.EmbeddingEngine, keys: Mapping[str, Tensor], training: bool) -> None:
        from karvan.store.cuda.batch_ids import FeatureIds, GroupLayout, LookupBuffers, shape_of_keys

        self.keys = keys  # kernels have their addresses
        memory = engine.store.memory  # type: ignore[attr-defined]
        tables = memory.tables
        arena = tables[next(iter(keys))].arena
        features = [
            (n, shape_of_keys(n, tables[name], len(ids))) for n, (name, ids) in enumerate(keys.items())
        ]
        layout = GroupLayout(arena, features, training)
        self.outs = layout.outputs(memory.device)
        self.buffers = LookupBuffers(memory, arena, layout.shape)
        self.buffers.load(layout, layout.describe([FeatureIds(ids) for ids in keys.values()], self.outs), 1)

    def find(self) -> None:
        """Find the rows; if training, claim rows for unknown keys."""
        from karvan.store.cuda import lookup

        lookup.find(self.buffers, grows=False)

    def insert(self) -> None:
        """Fill the rows of unknown keys."""
        from karvan.store.cuda import lookup

        lookup.insert(self.buffers)

    def find_or_insert(self) -> None:
        """Both."""
        self.find()
        self.insert()

    def copy_vectors(self) -> None:
        """Copy the vectors of the rows that were found."""
        from karvan.store.cuda import lookup

        lookup.fill_outputs(self.buffers)


def repeated(run: Run, work: Callable[[], None]) -> float:
    """The seconds of some work, which is repeated in a graph."""

    def often() -> None:
        for _ in range(run.sizes.repeats):
            work()

    replay = run.device.graph(often)
    return min(run.device.seconds(replay) for _ in range(run.sizes.rounds)) / run.sizes.repeats


def index(run: Run) -> None:
    """Find, find or insert, and insert, with an index that is half and three quarters full."""
    wanted = {
        0.5: {"find": 10, "find_or_insert": 8, "insert": 1},
        0.75: {"find": 5},
    }
    for load in run.sizes.loads:
        run.device.release()
        _rates_at(run, load, wanted[load])


def _rates_at(run: Run, load: float, wanted: Mapping[str, float]) -> None:
    from karvan.store.cuda.table_memory import KeyIndex

    device, sizes = run.device, run.sizes
    source = device.random(0)
    engine = device.engine({"a": kv.Table(4)})
    memory = engine.store.memory  # type: ignore[attr-defined]
    its = memory.tables["a"]
    its.index = KeyIndex(memory.device, sizes.slots, load=0.95)

    def draw(count: int) -> Tensor:
        return torch.randint(-(2**62), 2**62, (count,), generator=source, device=device.device)

    def reserve(count: int) -> None:
        memory.reserve(its.arena, {its: count})
        memory.note_lookup({its: count})

    keys = draw(int(sizes.slots * load))
    for some in keys.split(sizes.inserted):
        its.next_version()
        reserve(len(some))
        Lookup(engine, {"a": some}, training=True).find_or_insert()
        memory.counters.request_if_idle()
    at = torch.randint(0, len(keys), (sizes.queries,), generator=source, device=device.device)
    asked = {"a": keys[at]}
    rates = {
        "find": sizes.queries / repeated(run, Lookup(engine, asked, training=False).find),
        "find_or_insert": sizes.queries / repeated(run, Lookup(engine, asked, training=True).find_or_insert),
    }
    reserve(sizes.inserted)
    fresh = Lookup(engine, {"a": draw(sizes.inserted)}, training=True)
    device.wait()
    device.sleep(0.001)  # so that both launches are queued before the first begins
    rates["insert"] = sizes.inserted / device.seconds(fresh.find_or_insert)
    assert engine.table("a").rows >= len(keys)
    found = 8 + 4 + _SECTOR  # bytes: a key, its row number, a part of the index
    least = {
        "find": found,
        "find_or_insert": found,
        "insert": found + _SECTOR + its.arena.row_bytes,
    }
    for name, rate in rates.items():
        limit = wanted.get(name)
        run.results.add(
            f"{name}_at_{load}_G_per_s",
            f"{name.replace('_', ' ')}, load {load}",
            rate / 1e9,
            "G keys/s",
            None if limit is None else Wanted(limit),
            rate * least[name] / run.bandwidth,
        )


def gather(run: Run) -> None:
    """The copy of vectors, dim 128, fp32, beside the copy of the device that gives the bandwidth.

    Rows that occur more than once come from the cache, so that the traffic is more than memory has. The share
    of the bytes bound counts each row once.
    """
    device, sizes = run.device, run.sizes
    source = device.random(3)
    names = [f"t{i}" for i in range(sizes.tables)]
    engine = device.engine({name: kv.Table(sizes.dim) for name in names})
    kv.optim.Adam(engine, lr=0.01)  # rows as in the step: moments beside the vectors
    batches = [
        {name: power_law(source, sizes.lookups, sizes.universe) for name in names} for _ in range(sizes.sets)
    ]
    _fill_until_steady(engine, batches)
    lookups = [Lookup(engine, batch, training=False) for batch in batches]
    for lookup in lookups:
        lookup.find()
    _check_vectors(engine, batches[0], lookups[0])
    vector = 4 * sizes.dim
    unique = sum(len(keys.unique()) for keys in batches[0].values())
    positions = sizes.tables * sizes.lookups
    least = (unique + positions) * vector

    def gathers() -> None:
        for number in range(sizes.repeats):
            lookups[number % len(lookups)].copy_vectors()

    replay = device.graph(gathers)
    seconds = statistics.median(device.seconds(replay) / sizes.repeats for _ in range(3 * sizes.rounds))
    traffic = 2 * positions * vector / seconds
    run.results.add(
        "gather_vs_copy",
        f"gather, dim {sizes.dim}, of copy bandwidth",
        traffic / run.bandwidth,
        "x",
        Wanted(0.9),
        share=least / seconds / run.bandwidth,
    )
    run.results.add("gather_ms", f"  {positions:,} vectors", seconds * 1e3, "ms")
    run.results.add("gather_effective_TB_per_s", "  its traffic", traffic / 1e12, "TB/s")
    run.results.note(gather_unique_keys=unique, gather_TB_per_s=least / seconds / 1e12)


def _fill_until_steady(engine: kv.EmbeddingEngine, batches: list[dict[str, Tensor]]) -> None:
    """Insert all keys, and let the indexes finish to grow."""
    for _ in range(2):
        for batch in batches:
            engine(batch)
    tables = engine.store.memory.tables.values()  # type: ignore[attr-defined]
    while any(its.index.grows for its in tables):
        engine(batches[0])


def _check_vectors(engine: kv.EmbeddingEngine, batch: Mapping[str, Tensor], lookup: Lookup) -> None:
    """Raise if a gather does not write what the public lookup gives."""
    for out in lookup.outs.values():
        out.fill_(float("nan"))
    lookup.copy_vectors()
    with torch.no_grad():
        expected = engine(batch)
    for number, name in enumerate(batch):
        assert torch.equal(lookup.outs[number], expected[name]), f"The gather of {name} is wrong."
