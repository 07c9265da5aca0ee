"""What a host tier must do: all that a store without one does, bit for bit, with hot rows on the device."""

import ctypes
import random

import numpy as np
import pytest
import torch
from rows_conformance import assert_same_rows
from store_kinds import explore

import karvan as kv
from karvan.store.cuda.kernels import fields
from karvan.store.cuda.store import CudaStore

TABLES = {
    "a": kv.Table(5, "one"),
    "b": kv.Table(5, "one", "mean"),
    "c": kv.Table(3, "two", "sum", dtype=torch.bfloat16, evict=kv.eviction.LRU(capacity=12)),
}
SELDOM = {**TABLES, "d": kv.Table(5, "three", admit=kv.admission.MinCount(2, slots=1000))}
COUNTED = ("rows", "inserted", "evicted", "rejected", "dropped_gradients", "skipped_updates")


class Trained:
    """An engine on a store, with its optimizer, and the lookups that wait for their gradient."""

    def __init__(self, store, tables=TABLES, optimizer=kv.optim.Adagrad):
        self.store = store
        self.engine = kv.EmbeddingEngine(tables, seed=3, store=store)
        self.optimizer = optimizer(self.engine, lr=0.1)
        self.outputs = []

    def look_up(self, batch):
        out = self.engine(batch)
        self.outputs.append(out)
        return [each.detach().cpu() for each in out.values()]

    def train(self, seed):
        """Gradients of all lookups in flight, from the newest to the oldest, and one step."""
        generator = torch.Generator().manual_seed(seed)
        for out in reversed(self.outputs):
            factors = [torch.randn(each.shape, generator=generator).to(each.device) for each in out.values()]
            sum((each * f).sum() for each, f in zip(out.values(), factors, strict=True)).backward()
        self.outputs = []
        self.optimizer.step()


def random_batch(source, device, samples=4, keys=25):
    def ids(*shape):
        flat = [int(min(source.paretovariate(0.7), keys)) for _ in range(int(np.prod(shape)))]
        return torch.tensor(flat).reshape(shape).to(device)

    return {"a": ids(samples), "b": ids(samples, 2), "c": ids(samples), "d": ids(samples)}


def check_locations(store):
    """Every row number has one location, and every location one row."""
    torch.zeros(1, device=store.device).item()  # wait for the device
    for arena in store.memory._arenas.values():
        size = arena.capacity
        addresses, places = (each[:size].cpu().numpy() for each in (arena.chunks, arena.places))
        owners = arena.owners[: arena.device_rows].cpu().numpy()
        step = arena.row_bytes
        wanted = np.concatenate(
            [memory.data_ptr() + step * np.arange(memory.numel() // step) for memory in arena._memory]
        )
        assert np.array_equal(np.sort(addresses), np.sort(wanted))
        assert np.array_equal(places[owners], np.arange(len(owners)))
        assert (places >= 0).sum() == arena.device_rows
        assert set(np.unique(places[places < 0])) <= {-1}
        # Device locations, by their number.
        assert np.array_equal(addresses[owners], wanted[: arena.device_rows])
        assert owners[0] == 0
        zeros = torch.zeros(arena.layout.stride, dtype=torch.uint8)
        assert torch.equal(arena._memory[0][: arena.layout.stride].cpu(), zeros)


def bits_of_rows(store):
    """All that is noted of every row, by number, as kernels that run on the CPU find it."""
    found = []
    for arena in store.memory._arenas.values():
        used = int(store.memory.arena_counters(arena)[fields.NEXT_ROW.value])
        stride, shift = arena.layout.stride, arena.shift
        for row in range(1, used):
            chunk, local = int(arena.chunks[row >> shift]), row & ((1 << shift) - 1)
            parts = (
                (local * stride, arena.layout.dim * (2 if arena.layout.type else 4)),
                (local * stride + arena.layout.vector, 4 * arena.layout.state),
                ((stride << shift) + local * 8, 8),
                (((stride + 8) << shift) + local * 16, 16),
            )
            found.append([ctypes.string_at(chunk + start, size) for start, size in parts])
    return found


def assert_same_tables(both, names, *, by_memory):
    """by_memory: rows have the same numbers, and are compared without the kernels that list them."""
    if by_memory:
        assert bits_of_rows(both[0].store) == bits_of_rows(both[1].store)
        return
    for name in names:
        mine, theirs = (one.engine.table(name) for one in both)
        assert_same_rows(mine.snapshot(), theirs.snapshot())
        mine, theirs = mine.stats(), theirs.stats()
        assert [mine[each] for each in COUNTED] == [theirs[each] for each in COUNTED]
        assert theirs["device_bytes"] + theirs["host_bytes"] == theirs["bytes"]


def walk(source, device, length, device_memory, tables=SELDOM):
    """Random operations on a store with a tier and one without."""
    both = [Trained(CudaStore(device), tables), Trained(CudaStore(device, device_memory), tables)]
    tiered = both[1].store
    names = [handle.name for handle in both[0].engine.tables()]
    distinct = 0
    waiting = []
    for seed in range(length):
        actions = ["train"] * 8 + ["erase", "load", "clear", "look", "evict"]
        action = source.choice(actions)
        if action == "train":
            waiting += [random_batch(source, device) for _ in range(source.randint(0, 2))]
            for batch in waiting:
                if source.random() < 0.7:  # again, too: it is what it was
                    for one in both:
                        one.engine.prepare(batch, training=True)
            for _ in range(source.randint(1, 2)):
                batch = waiting.pop(0) if waiting else random_batch(source, device)
                mine, theirs = (one.look_up(batch) for one in both)
                assert all(map(torch.equal, mine, theirs))
                distinct += len(torch.cat([batch["a"], batch["b"].flatten()]).unique())
            if source.random() < 0.7:
                for one in both:
                    one.train(seed)
        elif action == "look":
            batch = random_batch(source, device)
            with torch.no_grad():
                mine, theirs = (one.engine(batch) for one in both)
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        else:
            name = source.choice(names)
            keys = source.sample(range(25), 6)
            for one in both:
                handle = one.engine.table(name)
                if action == "erase":
                    handle.evict_keys(keys)
                elif action == "load":
                    rows = handle.snapshot()
                    handle.evict_keys(keys)
                    handle.load(type(rows)(*(np.ascontiguousarray(part[::-1]) for part in rows)))
                elif action == "evict":
                    handle.evict()
                else:
                    handle.clear()
        assert_same_tables(both, names, by_memory=device == "cpu")
        check_locations(tiered)
    assert_same_tables(both, names, by_memory=False)
    stats = [tiered.table(name).stats() for name in names]
    assert stats[0]["tier_hits"] + stats[0]["tier_misses"] == distinct
    return sum(each["tier_exchanges"] for each in stats)


def zipf_batches(steps, size, keys, device, seed=0):
    """Batches of ids whose frequencies follow a power law."""
    rng = np.random.default_rng(seed)
    share = np.arange(1, keys + 1) ** -1.05
    shuffled = rng.permutation(keys)
    return [
        {"f": torch.from_numpy(shuffled[rng.choice(keys, size, p=share / share.sum())]).to(device)}
        for _ in range(steps)
    ]


def best_hit_rate(batches, warm, rows):
    """The hit rate after `warm` batches, if the rows that most batches have were on the device always."""
    seen = [batch["f"].unique().cpu().numpy() for batch in batches]
    keys, counts = np.unique(np.concatenate(seen), return_counts=True)
    best = keys[np.argsort(-counts, kind="stable")[:rows]]
    late = np.concatenate(seen[warm:])
    return np.isin(late, best).sum() / len(late)


def train_zipf(store, batches, warm, *, ahead):
    """(hits, misses) of the steps after the first `warm`; ahead: whether the next batch is prepared."""
    one = Trained(store, {"f": kv.Table(4, init=kv.init.Uniform(-1, 1))})
    for step, batch in enumerate(batches):
        if step == warm:
            before = one.engine.table("f").stats()
        if ahead and step + 1 < len(batches):
            one.engine.prepare(batches[step + 1], training=True)
        one.look_up(batch)
        one.train(step)
    after = one.engine.table("f").stats()
    check_locations(store)
    return [after[name] - before[name] for name in ("tier_hits", "tier_misses")], one


def prepared_phases(store, device, size, count):
    """Train two layouts with each next batch prepared, in phases of `count` steps; yields after each step.

    Few keys; then all of them, so that the tier grows; batches of two sizes; then some keys are erased; at
    last a table is cleared. Yields (what was trained, whether a phase has ended).
    """
    one = Trained(store, {"f": kv.Table(4), "g": kv.Table(8, combiner="mean")})
    keys = 4 * size.rows

    def erase():
        one.engine.table("f").evict_keys(range(0, keys, 3))

    def clear():
        one.engine.table("g").clear()

    def nothing():
        pass

    def phase(number, keys=keys):
        return [batch["f"] for batch in zipf_batches(count, size.batch, keys, device, seed=number)]

    small = [ids[: size.batch // 5] for ids in phase(2)]
    phases = [
        (nothing, phase(0, keys // 8)),
        (nothing, [torch.arange(keys).to(device), *phase(1)]),
        (nothing, [ids for pair in zip(phase(3), small, strict=True) for ids in pair]),
        (erase, phase(4)),
        (clear, phase(5)),
    ]
    ids = [each for _, some in phases for each in some]
    batches = [{"f": each, "g": each.view(-1, 1)} for each in ids] + [None]
    number = 0
    for change, some in phases:
        change()
        for left in reversed(range(len(some))):
            batch, following = batches[number : number + 2]
            if following is not None:
                one.engine.prepare(following, training=True)
            sum(each.square().sum() for each in one.engine(batch).values()).backward()
            one.optimizer.step()
            number += 1
            yield one, not left


class TierConformance:
    """Tests of the host tier, for a device and the size of their tables."""

    def test_rows_have_the_bits_of_a_store_without_a_tier(self, device, size):
        assert walk(random.Random(2), device, size.walk, 500, TABLES) > 5

    @pytest.mark.slow
    def test_rows_have_the_bits_of_a_store_without_a_tier_after_any_operations(self, device, size):
        found = []

        def explored(source):
            """Numbers that hypothesis draws are small and alike, so that all rows would fit."""
            random_ = random.Random(source.randrange(1 << 30))
            found.append(walk(random_, device, size.walk, random_.choice([500, 1000, 2000])))

        explore(explored, size.examples, shrink=False)
        assert sum(found) > 10

    def test_hot_rows_come_to_the_device(self, device, size):
        """Ids by a power law, a table of four times what fits: nearly as good as knowing the best rows."""
        batches = zipf_batches(size.steps, size.batch, 4 * size.rows, device)
        store = CudaStore(device, (64 + 8) * size.rows)
        (hits, misses), _ = train_zipf(store, batches, size.warm, ahead=False)
        best = best_hit_rate(batches, size.warm, size.rows - 1)
        assert hits / (hits + misses) > 0.85 * best

    def test_rows_of_a_prepared_batch_are_on_the_device_when_it_is_looked_up(self, device, size):
        """There is room for both: two batches have fewer rows than fit."""
        every = {"f": torch.arange(4 * size.rows).to(device)}  # from here on, all keys are known
        batches = [every, *zipf_batches(size.steps - size.warm, size.batch // 4, 4 * size.rows, device)]
        store = CudaStore(device, (64 + 8) * size.rows)
        (hits, misses), one = train_zipf(store, batches, 2, ahead=True)
        assert hits > 0
        assert misses <= 0.01 * hits  # a row that looks at eight locations may meet rows of the batches only
        plain = Trained(CudaStore(device), {"f": kv.Table(4, init=kv.init.Uniform(-1, 1))})
        for step, batch in enumerate(batches):
            plain.look_up(batch)
            plain.train(step)
        assert_same_rows(plain.engine.table("f").snapshot(), one.engine.table("f").snapshot())

    def test_prepared_batches_have_the_bits_of_a_store_without_a_tier(self, device, size):
        tiered = CudaStore(device, 2 * (64 + 8) * size.rows)
        both = [prepared_phases(store, device, size, size.phase) for store in (CudaStore(device), tiered)]
        for (plain, ended), (one, _) in zip(*both, strict=True):
            if ended:
                assert_same_tables([plain, one], "fg", by_memory=device == "cpu")
                check_locations(tiered)
        assert all(one.engine.table(name).stats()["tier_exchanges"] > 0 for name in "fg")
