"""What training on a store must do: every optimizer, combiner and dtype, against a dict of rows."""

import random

import pytest
import reference as ref
import torch
from engine_pair import KEYS, Pair, combiners, random_rows, tensor_of, weigh
from store_kinds import also_slowly, explore

import karvan as kv

SHARED = {  # a and b share the rows of table one; c has table two, of the same dim
    "a": ref.Feature(3, "sum"),
    "b": ref.Feature(3, "mean"),
    "c": ref.Feature(3, "sequence", length=2),
}
TABLES = {"a": "one", "b": "one", "c": "two"}
QUICK = {
    *("sgd-clip-value", "sgd-nesterov", "adagrad-clip-norm", "adagrad-row", "adam-l2", "adamw-amsgrad"),
    *("adamw", "ftrl-tf"),
}


def pair_of(kind, features=SHARED, optimizer="adagrad", tables=TABLES, **options):
    return Pair(features, optimizer, tables, make_store=kind.make, skips_rows=kind.skips_rows, **options)


def random_batch(source, features=SHARED, **options):
    """Ids of some features, of which some have weights."""
    batch = {}
    for name in features:
        rows = random_rows(source, **options)
        batch[name] = rows, weigh(rows, source.randint(0, 9)) if source.random() < 0.5 else None
    return batch


def accumulate(pair, batches, seed, **options):
    """Several backward passes, then one step."""
    parts = [pair.backward(*pair.forward(batch), seed, **options) for batch in batches]
    pair.update({table: ref.add_gradients(*(part[table] for part in parts)) for table in pair.tables})
    pair.check()


class TrainingConformance:
    """Tests of training, for a `StoreKind`."""

    @pytest.mark.parametrize("optimizer", also_slowly(ref.OPTIMIZERS, QUICK))
    def test_every_optimizer(self, kind, optimizer):
        pair, source = pair_of(kind, optimizer=optimizer), random.Random(optimizer)
        pair.train(random_batch(source), seed=0)
        if kind.slow:  # other tests accumulate
            pair.train(random_batch(source), seed=1)
            return
        accumulate(pair, [random_batch(source) for _ in range(2)], seed=1)
        for _ in range(3):
            pair.train(random_batch(source), seed=2)

    def test_every_combiner_with_and_without_weights(self, kind):
        features = combiners(4)
        shared = [name for name, feature in features.items() if kind.slow and feature.stack is None]
        pair = pair_of(kind, features, "adagrad", dict.fromkeys(shared, "one"))
        source = random.Random(1)
        for seed in range(kind.few(6, 2)):
            rows = {name: random_rows(source) for name in features}
            pair.train({n: (r, weigh(r, seed) if seed % 2 else None) for n, r in rows.items()}, seed)

    def test_means_by_density_and_weights_that_are_ignored(self, kind):
        features = {
            "density": ref.Feature(3, "mean_by_density"),
            "tile": ref.Feature(3, "tile", length=2, use_weights=False),
            "mean": ref.Feature(3, "mean", use_weights=False),
        }
        pair, source = pair_of(kind, features, "sgd", dict.fromkeys(features, "one")), random.Random(2)
        rows = [[source.choice(KEYS) for _ in range(size)] for size in (9, 8, 0, 9)]
        for seed, last in enumerate((rows[3][:8], rows[3])):  # with 25 ids of 4 samples, and with 26
            batch = [*rows[:3], last]
            pair.train({name: (batch, weigh(batch, seed)) for name in features}, seed)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_rows_of_16_bits(self, kind, dtype):
        features = {name: ref.Feature(5, how) for name, how in (("a", "sum"), ("b", "ragged"))}
        dtypes = dict.fromkeys(features, dtype)
        pair = pair_of(kind, features, "adam", {"a": "one", "b": "one"}, dtypes=dtypes)
        source = random.Random(1)
        for seed in range(kind.few(6, 2)):
            pair.train(random_batch(source, features), seed)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_rounding_to_16_bits_has_no_bias(self, kind, dtype):
        """Every value goes up or down to a neighbour, as often as it takes for the mean to be right."""
        engine = kv.EmbeddingEngine(
            {"f": kv.Table(8, dtype=dtype, init=kv.init.Constant(1.0))}, store=kind.make()
        )
        opt = kv.optim.SGD(engine, lr=1.0)
        keys = torch.arange(kind.few(2000, 400))
        eps = torch.finfo(dtype).eps
        out = engine({"f": keys})["f"]
        (out * -0.3 * eps).sum().backward()
        opt.step()
        units = (engine.table("f").vectors(keys) - 1.0) / eps
        assert set(units.unique().tolist()) == {0.0, 1.0}
        assert abs(units.mean() - 0.3) < 5 * (0.3 * 0.7 / units.numel()) ** 0.5
        assert (units.mean(0) - 0.3).abs().max() < 5 * (0.3 * 0.7 / len(keys)) ** 0.5

    def test_tables_of_many_dims_in_one_engine(self, kind):
        features = {f"f{dim}": ref.Feature(dim, "sum") for dim in (1, 9, 2, 5, 6, 7)[: kind.few(6, 2)]}
        pair, source = pair_of(kind, features, "adagrad-row", None), random.Random(3)
        for seed in range(kind.few(3, 1)):
            pair.train(random_batch(source, features), seed)

    def test_a_feature_that_reads_alone_and_lists_of_lists_beside_features_that_train(self, kind):
        """The rows are those of training without it, and it sees them as they are, new ones included."""
        tables = {"a": kv.Table(3, name="one"), "c": kv.Table(2, combiner="mean")}
        reads = {
            "z": kv.Table(4, read_only=True),
            "b": kv.Table(3, name="one", combiner="sequence", length=2, read_only=True),
        }
        engine = kv.EmbeddingEngine({"z": reads["z"], **tables, "b": reads["b"]}, store=kind.make())
        plain = kv.EmbeddingEngine(tables, store=kind.make())
        sparse, expected = (kv.optim.SGD(each, lr=0.5) for each in (engine, plain))
        deep = torch.tensor([[[1, 2], [3, 3]], [[4, 1], [5, 6]]])
        flat = {"a": deep.reshape(4, 2), "c": torch.tensor([1, 2, 1, 3])}
        for step in range(kind.few(3, 2)):
            ids = torch.tensor([[1, 90 + step], [7, 4]])
            before = plain(flat)
            batch = {"a": deep, "c": flat["c"].reshape(2, 2, 1), "b": ids, "z": torch.tensor([1, 2])}
            made = engine(batch)
            assert torch.equal(made["a"], before["a"].reshape(2, 2, 3))
            assert torch.equal(made["c"], before["c"].reshape(2, 2, 2))
            found = plain.table("one").vectors(ids.reshape(-1)).reshape(2, 2, 3)
            assert torch.equal(made["b"].values.cpu(), found)
            assert not made["z"].any()
            weights = torch.arange(12.0, device=made["a"].device).reshape(2, 2, 3)
            (made["a"] * weights).sum().add(made["c"].sum()).backward()
            (before["a"] * weights.reshape(4, 3)).sum().add(before["c"].sum()).backward()
            sparse.step()
            expected.step()
        assert engine.sizes() == {**plain.sizes(), "z": 0}
        for name in plain.sizes():
            for received, wanted in zip(
                engine.table(name).snapshot(), plain.table(name).snapshot(), strict=True
            ):
                assert (received == wanted).all()

    def test_features_without_a_gradient_and_tables_without_an_optimizer(self, kind):
        pair, source = pair_of(kind), random.Random(4)
        pair.train(random_batch(source), seed=0, without=("b",))
        pair.train(random_batch(source), seed=1, without=("a", "c"))
        accumulate(pair, [random_batch(source) for _ in range(2)], seed=2, without=("a",))
        engine = kv.EmbeddingEngine({"x": kv.Table(4), "y": kv.Table(4)}, store=kind.make())
        opt = kv.optim.SGD([{"params": engine.table("y"), "lr": 1.0}])
        out = engine({"x": torch.tensor([1, 2]), "y": torch.tensor([1, 2])})
        before = {name: engine.table(name).vectors([1, 2]) for name in "xy"}
        (out["x"].sum() + out["y"].sum()).backward()
        opt.step()
        assert torch.equal(engine.table("x").vectors([1, 2]), before["x"])
        torch.testing.assert_close(engine.table("y").vectors([1, 2]), before["y"] - 1.0)

    def test_features_without_ids_beside_others_of_their_table(self, kind):
        tables = {
            "a": kv.Table(4, "shared"),
            "b": kv.Table(4),
            "c": kv.Table(4, combiner="ragged"),
            "d": kv.Table(4, "shared"),
        }
        engine = kv.EmbeddingEngine(tables, store=kind.make())
        opt = kv.optim.SGD(engine, lr=1.0)
        nothing = kv.Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        batch = {"a": torch.tensor([1]), "b": torch.tensor([2]), "c": nothing, "d": nothing}
        out = engine(batch)
        before = {"shared": engine.table("shared").vectors([1]), "b": engine.table("b").vectors([2])}
        (out["a"].sum() + 2 * out["b"].sum() + out["c"].values.sum() + out["d"].sum()).backward()
        opt.step()
        torch.testing.assert_close(engine.table("shared").vectors([1]), before["shared"] - 1.0)
        torch.testing.assert_close(engine.table("b").vectors([2]), before["b"] - 2.0)
        assert [engine.table(name).rows for name in ("shared", "b", "c")] == [1, 1, 0]

    def test_tables_with_different_optimizers(self, kind):
        """Also those whose rows have the same layout."""
        rules = {"x": ref.make_rule("adam"), "y": ref.make_rule("ftrl"), "z": ref.make_rule("adagrad")}
        engine = kv.EmbeddingEngine({name: kv.Table(4) for name in rules}, store=kind.make())
        optimizers = [
            kv.optim.Adam(engine.table("x"), lr=0.01),
            kv.optim.FTRL(engine.table("y"), lr=0.1, l1=0.01, l2=0.1),
            kv.optim.Adagrad(engine.table("z"), lr=0.1),
        ]
        batch = {name: torch.tensor([1, 2, 1]) for name in rules}
        out = engine(batch)
        before = {name: engine.table(name).vectors([1, 2]) for name in rules}
        sum(
            (out[name] * torch.tensor([1.0, 2.0, 3.0, 4.0]).to(out[name].device)).sum() for name in rules
        ).backward()
        for opt in optimizers:
            opt.step()
        gradient = torch.tensor([[2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0]])
        for name, rule in rules.items():
            expected, _ = rule.apply(before[name], gradient, rule.initial(2, 4), 1)
            torch.testing.assert_close(engine.table(name).vectors([1, 2]), expected, rtol=1e-4, atol=1e-6)

    def test_gradients_that_are_not_finite(self, kind):
        pair, source = pair_of(kind), random.Random(5)
        pair.train(random_batch(source), seed=0, nan_in="one")
        pair.train(random_batch(source), seed=1, nan_key=source.choice(KEYS))
        batches = [random_batch(source) for _ in range(2)]
        accumulate(pair, batches, seed=2, nan_key=2)
        pair.train(random_batch(source), seed=3)

    @pytest.mark.parametrize("back", [False, True])
    def test_gradients_of_rows_that_were_erased(self, kind, back):
        """Half of a table's keys leave between lookup and gradient; perhaps they come back as new rows."""
        pair, source = pair_of(kind), random.Random(6)
        batch = random_batch(source)
        lookups, outputs = pair.forward(batch)
        gone = sorted(set(lookups["a"].occurrences) | set(lookups["b"].occurrences))[1::2]
        assert gone
        pair.engine.table("one").evict_keys(gone)
        pair.tables["one"].evict(gone)
        if back:
            pair.forward(batch)
        pair.update(pair.backward(lookups, outputs, seed=0), gone={"one": gone})
        pair.check()

    def test_gradients_of_rows_that_were_erased_between_two_passes(self, kind):
        """Each pass drops the gradients of its own rows; only keys with a gradient are counted."""
        engine = kv.EmbeddingEngine({"f": kv.Table(2, "t"), "g": kv.Table(2, "t")}, store=kind.make(), seed=1)
        opt = kv.optim.SGD(engine, lr=1.0)
        handle = engine.table("t")

        def passed(f, g, both):
            out = engine({"f": torch.tensor(f), "g": torch.tensor(g)})
            return out["f"].sum() + (out["g"].sum() if both else 0)

        first = passed([1, 2], [3, 4], both=False)
        start = handle.vectors([1, 2, 3, 4])
        first.backward()
        handle.evict_keys([2, 4])
        second = passed([2, 1], [4, 3], both=True)
        second.backward()
        opt.step()
        torch.testing.assert_close(
            handle.vectors([1, 2, 3, 4]) - start,
            torch.tensor([[-2.0] * 2, [-1.0] * 2, [-1.0] * 2, [-1.0] * 2]),
        )
        assert handle.stats()["dropped_gradients"] == 1  # key 2 of the first pass; 4 had no gradient there

    def test_a_row_that_another_table_has_got_since_does_not_receive_the_gradient(self, kind):
        """Tables of one layout may share memory; x has changed more often than y."""
        engine = kv.EmbeddingEngine({"x": kv.Table(2), "y": kv.Table(2)}, store=kind.make())
        opt = kv.optim.SGD(engine, lr=1.0)
        for key in range(4):
            engine.table("x").load(engine.table("x").snapshot())
            engine.table("x").evict_keys([key])
        out = engine({"x": torch.tensor([1, 3]), "y": torch.tensor([1, 1])})["x"]
        engine.table("x").evict_keys([1])
        engine({"x": torch.tensor([3, 3]), "y": torch.tensor([7, 1])})
        before = engine.table("y").vectors([1, 7])
        out.sum().backward()
        opt.step()
        assert torch.equal(engine.table("y").vectors([1, 7]), before)
        assert engine.table("x").stats()["dropped_gradients"] == 1

    def test_a_scaled_loss(self, kind):
        pair, source = pair_of(kind), random.Random(7)
        batch = random_batch(source)
        for passes in (1, 2):
            lookups = outputs = None
            parts = []
            pair.engine.gradient_scale = 8.0
            for _ in range(passes):
                lookups, outputs = pair.forward(batch)
                scaled = {name: _times(output, 8.0) for name, output in outputs.items()}
                parts.append(pair.backward(lookups, scaled, seed=0))
            pair.update({t: ref.add_gradients(*(p[t] for p in parts)) for t in pair.tables})
            pair.check()

    def test_evaluation_inserts_nothing_and_changes_nothing(self, kind):
        pair, source = pair_of(kind), random.Random(8)
        pair.train(random_batch(source, keys=[1, 2]), seed=0)
        versions = {name: pair.engine.table(name).version for name in pair.tables}
        batch = random_batch(source)
        pair.engine.eval()
        pair.check_outputs(pair.look_up(batch), pair.call(batch))
        pair.engine.train()
        with torch.no_grad():
            pair.check_outputs(pair.look_up(batch), pair.call(batch))
        pair.check()
        assert versions == {name: pair.engine.table(name).version for name in pair.tables}

    @pytest.mark.parametrize("combiner", also_slowly(combiners(3), ("sum", "ragged", "stack-sequence")))
    def test_a_batch_without_any_id_gives_zeros_and_changes_nothing(self, kind, combiner):
        pair = pair_of(kind, {"f": combiners(3)[combiner]}, "adagrad", None)
        lookups, outputs = pair.forward({"f": ([[], [], []], None)})
        assert not tensor_of(outputs["f"]).any()
        pair.update(pair.backward(lookups, outputs, seed=1))
        pair.check()
        if not kind.slow or combiner in ("sum", "ragged", "stack-sequence"):
            pair.train({"f": ([[1, 2], [3], []], None)}, seed=0)

    def test_one_key_a_thousand_times_and_a_thousand_keys_once(self, kind):
        """Long runs of one key are summed in pieces."""
        features = {"a": ref.Feature(4, "ragged"), "b": ref.Feature(4, "mean")}
        pair = pair_of(kind, features, "sgd", {"a": "one", "b": "one"})
        once = [[int(key)] for key in torch.randperm(1000)]
        pair.train({"a": ([[7]] * 1000, None), "b": (once, None)}, seed=0)

    def test_runs_of_lengths_around_a_piece(self, kind):
        pair = pair_of(kind, {"a": ref.Feature(4, "sum")}, "adagrad", None)
        sizes = [1, 2, 63, 64, 65, 127, 128, 129, 193]
        ids = [[size] for size in sizes for _ in range(size)]
        random.Random(1).shuffle(ids)
        pair.train({"a": (ids, None)}, seed=0)

    def test_each_of_many_wide_rows_is_updated_once(self, kind):
        """A program of an update has one wide row at a time: of few gradients, or of several pieces."""
        pair = pair_of(kind, {"a": ref.Feature(300, "sum")}, "adagrad", None)
        sizes = [1, 2, 3, 1, 2, 65, 66, 67, 65, 130]
        ids = [[key] for key, size in enumerate(sizes) for _ in range(size)]
        random.Random(1).shuffle(ids)
        pair.train({"a": (ids, None)}, seed=0)

    def test_plain_ids_of_each_shape(self, kind):
        """One id for each sample, or a matrix of ids: features without offsets."""
        engine = kv.EmbeddingEngine(
            {"one": kv.Table(3, "t"), "grid": kv.Table(3, "t", "mean"), "tile": kv.Table(3, "t", "tile", 2)},
            store=kind.make(),
        )
        opt = kv.optim.SGD(engine, lr=1.0)
        one, grid = torch.tensor([5, -1, 5]), torch.tensor([[1, 2], [5, 5], [-1, 2]])
        out = engine({"one": one, "grid": grid, "tile": grid})
        vector = dict(zip([1, 2, 5, -1], engine.table("t").vectors([1, 2, 5, -1]), strict=True))
        for got, row in zip(out["one"].cpu(), one.tolist(), strict=True):
            assert torch.equal(got, vector[row])
        for got, tile, row in zip(out["grid"].cpu(), out["tile"].cpu(), grid.tolist(), strict=True):
            torch.testing.assert_close(got, (vector[row[0]] + vector[row[1]]) / 2)
            assert torch.equal(tile, torch.cat([vector[key] for key in row]))
        (out["one"].sum() + out["grid"].sum() + 2 * out["tile"].sum()).backward()
        opt.step()
        counts = {1: 0.5 + 2, 2: 1 + 4, 5: 2 + 1 + 4, -1: 1 + 0.5 + 2}
        for key, moved in counts.items():
            torch.testing.assert_close(engine.table("t").vectors([key])[0], vector[key] - moved)

    def test_any_operations(self, kind):
        explore(lambda source: _operate(kind, source, kind.few(10, 5)), kind.few(5, 3), not kind.slow)


def _times(output, factor):
    return tensor_of(output) * factor


def _operate(kind, source, length):
    """A random walk through what a program may do."""
    pair = pair_of(kind, optimizer=source.choice(sorted(ref.OPTIMIZERS)))
    walk = _Walk(kind, pair, source)
    for _ in range(source.randint(1, length)):
        action = source.choice(_Walk.ACTIONS)
        getattr(walk, action)()
        pair.check()


class _Walk:
    ACTIONS = ("train", "train", "accumulate", "forget", "look", "erase", "late", "broken", "move", "clear")

    def __init__(self, kind, pair, source):
        self.kind, self.pair, self.source = kind, pair, source

    def batch(self):
        return random_batch(self.source, samples=3)

    def seed(self):
        return self.source.randint(0, 99)

    def train(self):
        self.pair.train(self.batch(), self.seed())

    def accumulate(self):
        accumulate(self.pair, [self.batch() for _ in range(self.source.randint(2, 3))], self.seed())

    def forget(self):
        self.pair.backward(*self.pair.forward(self.batch()), self.seed())
        self.pair.opt.zero_grad()
        self.pair.opt.step()

    def look(self):
        batch = self.batch()
        with torch.no_grad():
            outputs = self.pair.call(batch)
        self.pair.check_outputs(self.pair.look_up(batch), outputs)

    def erase(self):
        gone = self.source.choices(KEYS, k=self.source.randint(1, 4))
        handle, table = self.pair.engine.table("one"), self.pair.tables["one"]
        version, present = handle.version, set(gone) & set(table.rows)
        assert handle.evict_keys(gone) == len(present)
        table.evict(gone)
        assert sorted(handle.evicted_since(version).tolist()) == sorted(present)

    def late(self):
        lookups, outputs = self.pair.forward(self.batch())
        keys = sorted(set(lookups["a"].occurrences) | set(lookups["b"].occurrences))
        gone = keys[1::2]
        self.pair.engine.table("one").evict_keys(torch.tensor(gone, dtype=torch.int64))
        self.pair.tables["one"].evict(gone)
        if self.source.random() < 0.5:
            self.pair.forward(self.batch())
        self.pair.update(self.pair.backward(lookups, outputs, self.seed()), gone={"one": gone})

    def broken(self):
        lookups, outputs = self.pair.forward(self.batch())
        where = self.source.choice(["one", "two"])
        self.pair.update(self.pair.backward(lookups, outputs, self.seed(), nan_in=where))

    def move(self):
        pair, old = self.pair, self.pair.engine
        saved = pair.opt.state_dict()
        pair.engine, pair.opt = pair.fresh()
        for name, table in pair.tables.items():
            pair.engine.table(name).load(old.table(name).snapshot())
            table.dropped = table.skipped = 0
        pair.opt.load_state_dict(saved)

    def clear(self):
        name = self.source.choice(["one", "two"])
        self.pair.engine.table(name).clear()
        self.pair.tables[name].evict(list(self.pair.tables[name].rows))
