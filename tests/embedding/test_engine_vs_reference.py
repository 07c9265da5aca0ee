"""The engine against the slow reference: every combiner, dtype and optimizer, over random operations."""

import itertools
import random

import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import karvan as kv
from karvan.embedding import HashStack

DIM = 3
COMBINERS = {
    "sum": ref.Feature(DIM, "sum"),
    "mean": ref.Feature(DIM, "mean"),
    "sqrtn": ref.Feature(DIM, "sqrtn"),
    "sequence": ref.Feature(DIM, "sequence"),
    "sequence-2": ref.Feature(DIM, "sequence", length=2),
    "tile": ref.Feature(DIM, "tile", length=2),
    "ragged": ref.Feature(DIM, "ragged"),
    "stack-sum": ref.Feature(DIM, "sum", stack=(2, 5)),
    "stack-mean": ref.Feature(DIM, "mean", stack=(3, 4)),
    "stack-sequence": ref.Feature(DIM, "sequence", length=3, stack=(2, 5)),
}
KEYS = [*range(6), -1, -2, 2**63 - 1, -(2**63), 2**53 + 1, -(2**62)]
WEIGHTS = [0.25, 0.5, 1.0, 1.5, 2.5]

keys = st.sampled_from(KEYS)
ids = st.lists(st.lists(keys, max_size=4), min_size=3, max_size=3).filter(any)


def table_of(feature, name=None, dtype=torch.float32):
    stack = None if feature.stack is None else HashStack(rounds=feature.stack[0], size=feature.stack[1])
    return kv.Table(
        feature.dim,
        name=name,
        combiner=feature.combiner,
        length=feature.length,
        dtype=dtype,
        init=kv.init.Uniform(-0.3, 0.3),
        hash_stack=stack,
    )


def tensor_of(output):
    """The tensor of an output, which may be a Tensor, a Padded or a Ragged."""
    return output if isinstance(output, torch.Tensor) else output.values


class Pair:
    """A real engine and its reference, moved together; features of one table name share rows."""

    def __init__(self, features, optimizer, tables=None, dtypes=None):
        self.features, self.optimizer_name = features, optimizer
        self.table_names = tables or {name: name for name in features}
        self.dtypes = dtypes or dict.fromkeys(features, torch.float32)
        self.engine, self.opt = self.fresh()
        self.first = {}  # (table, key) -> the vector it first had: an initialiser depends on nothing else
        self.tables = {}
        for name, table in self.table_names.items():
            init = lambda key, table=table: self.initial(table, key)  # noqa: E731
            self.tables[table] = ref.ReferenceTable(
                features[name].dim, ref.make_rule(optimizer), init, self.dtypes[name]
            )

    def fresh(self):
        engine = kv.EmbeddingEngine(
            {n: table_of(f, self.table_names[n], self.dtypes[n]) for n, f in self.features.items()}, seed=7
        )
        cls, options = ref.OPTIMIZERS[self.optimizer_name]
        return engine, getattr(kv.optim, cls)(engine, **options)

    def initial(self, table, key):
        vector = self.engine.table(table).vectors(torch.tensor([key]))[0]
        assert torch.equal(self.first.setdefault((table, key), vector), vector)
        return vector

    def look_up(self, batch):
        return {n: ref.look_up(f, *batch[n]) for n, f in self.features.items()}

    def call(self, batch):
        return self.engine(
            {n: kv.Ragged.from_lists(rows, weights=weights) for n, (rows, weights) in batch.items()}
        )

    def check_outputs(self, lookups, outputs):
        assert list(outputs) == list(self.features)
        for name, lookup in lookups.items():
            received = tensor_of(outputs[name])
            assert received.dtype == torch.float32
            assert tuple(received.shape) == lookup.shape
            expected = lookup.forward(self.tables[self.table_names[name]].vector).float()
            torch.testing.assert_close(received.detach(), expected, rtol=ref.RTOL, atol=ref.ATOL)
            if lookup.mask is not None:
                assert torch.equal(outputs[name].mask, lookup.mask)

    def forward(self, batch):
        """A training lookup."""
        lookups, before = self.look_up(batch), self.engine.step
        outputs = self.call(batch)
        assert self.engine.step == before + 1
        for name, lookup in lookups.items():
            self.tables[self.table_names[name]].see(lookup.occurrences, self.engine.step)
        self.check_outputs(lookups, outputs)
        return lookups, outputs

    def backward(self, lookups, outputs, seed, nan_in=None):
        """Random gradients: one sign per column, so that no sum of them cancels down to rounding errors."""
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros(())
        parts = {table: [] for table in self.tables}
        for name, lookup in lookups.items():
            g = 0.25 + torch.rand(lookup.shape, generator=generator).reshape(-1, self.features[name].dim)
            sign = torch.randint(
                0, 2, (self.features[name].dim,), generator=torch.Generator().manual_seed(seed)
            )
            g = (g * (2 * sign - 1)).reshape(lookup.shape)
            if self.table_names[name] == nan_in:
                g = g * float("nan")
            loss = loss + (tensor_of(outputs[name]) * g).sum()
            parts[self.table_names[name]].append(lookup.backward(g))
        loss.backward()
        return {table: ref.add_gradients(*p) for table, p in parts.items()}

    def update(self, gradients, gone=None):
        self.opt.step()
        self.opt.zero_grad()
        for name, table in self.tables.items():
            if gradients[name]:
                table.apply(gradients[name], (gone or {}).get(name, ()))

    def check(self):
        for name, table in self.tables.items():
            handle = self.engine.table(name)
            ref.check_table(handle, table)
            stats = handle.stats()
            assert stats["dropped_gradients"] == table.dropped
            assert stats["skipped_updates"] == table.skipped

    def train(self, batch, seed):
        lookups, outputs = self.forward(batch)
        self.update(self.backward(lookups, outputs, seed))
        self.check()


def weigh(rows, seed):
    source = random.Random(seed)
    return [[source.choice(WEIGHTS) for _ in row] for row in rows]


def random_rows(source):
    rows = [[source.choice(KEYS) for _ in range(source.randrange(5))] for _ in range(4)]
    return rows if any(rows) else [[0], [], [], []]


@pytest.mark.parametrize("optimizer", ref.OPTIMIZERS)
def test_all_combiners_weights_and_dtypes_in_one_engine(optimizer):
    features, dtypes, weighted = {}, {}, {}
    for (name, feature), dtype, with_weights in itertools.product(
        COMBINERS.items(), ref.DTYPES, (False, True)
    ):
        label = f"{name} {dtype} {with_weights}"
        features[label], dtypes[label], weighted[label] = feature, dtype, with_weights
    pair, source = Pair(features, optimizer, dtypes=dtypes), random.Random(optimizer)
    for seed in range(3):
        rows = {name: random_rows(source) for name in features}
        pair.train({n: (r, weigh(r, seed) if weighted[n] else None) for n, r in rows.items()}, seed)


@pytest.mark.parametrize("dtype", ref.DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", ref.OPTIMIZERS)
@given(
    combiner=st.sampled_from(list(COMBINERS)),
    steps=st.lists(st.tuples(ids, st.booleans(), st.integers(0, 99)), min_size=1, max_size=4),
)
def test_any_steps_equal_the_reference(optimizer, dtype, combiner, steps):
    pair = Pair({"f": COMBINERS[combiner]}, optimizer, dtypes={"f": dtype})
    for rows, weighted, seed in steps:
        pair.train({"f": (rows, weigh(rows, seed) if weighted else None)}, seed)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_batch_without_any_id_gives_zeros_and_changes_nothing(combiner):
    pair = Pair({"f": COMBINERS[combiner]}, "adagrad")
    pair.train({"f": ([[1, 2], [3], []], None)}, seed=0)
    rows = pair.engine.table("f").rows
    lookups, outputs = pair.forward({"f": ([[], [], []], None)})
    assert not tensor_of(outputs["f"]).any()
    pair.update(pair.backward(lookups, outputs, seed=1))
    assert pair.engine.table("f").rows == rows > 0
    pair.check()


class Training(RuleBasedStateMachine):
    """Features a and b share the rows of table one; c has table two."""

    FEATURES = {  # noqa: RUF012
        "a": COMBINERS["sum"],
        "b": COMBINERS["mean"],
        "c": COMBINERS["sequence-2"],
    }
    batches = st.fixed_dictionaries(
        {name: st.tuples(ids, st.booleans(), st.integers(0, 9)) for name in FEATURES}
    ).map(lambda b: {n: (rows, weigh(rows, seed) if w else None) for n, (rows, w, seed) in b.items()})
    seeds = st.integers(0, 99)

    @initialize(optimizer=st.sampled_from(list(ref.OPTIMIZERS)))
    def start(self, optimizer):
        self.pair = Pair(self.FEATURES, optimizer, tables={"a": "one", "b": "one", "c": "two"})

    @rule(batch=batches, seed=seeds)
    def train(self, batch, seed):
        self.pair.train(batch, seed)

    @rule(parts=st.lists(st.tuples(batches, seeds), min_size=2, max_size=3))
    def accumulate(self, parts):
        """Gradients of several backward passes add up until the step; one sign for all of them."""
        gradients = []
        for batch, _ in parts:
            gradients.append(self.pair.backward(*self.pair.forward(batch), seed=parts[0][1]))
        self.pair.update({t: ref.add_gradients(*(g[t] for g in gradients)) for t in self.pair.tables})

    @rule(batch=batches, seed=seeds)
    def zero_grad_forgets(self, batch, seed):
        self.pair.backward(*self.pair.forward(batch), seed)
        self.pair.opt.zero_grad()
        self.pair.opt.step()

    @rule(batch=batches, no_grad=st.booleans())
    def look_without_training(self, batch, no_grad):
        pair, before = self.pair, self.pair.engine.step
        if no_grad:
            with torch.no_grad():
                outputs = pair.call(batch)
        else:
            pair.engine.eval()
            outputs = pair.call(batch)
            pair.engine.train()
        assert pair.engine.step == before
        pair.check_outputs(pair.look_up(batch), outputs)

    @rule(factor=st.sampled_from([0.5, 0.9, 2.0]))
    def change_lr(self, factor):
        for group in self.pair.opt.param_groups:
            group["lr"] *= factor
        for table in self.pair.tables.values():
            table.rule.lr *= factor

    @rule(table=st.sampled_from(["one", "two"]), gone=st.lists(keys, max_size=4))
    def evict(self, table, gone):
        handle = self.pair.engine.table(table)
        version, present = handle.version, set(gone) & set(self.pair.tables[table].rows)
        handle.evict_keys(torch.tensor(gone, dtype=torch.int64))
        self.pair.tables[table].evict(gone)
        assert sorted(handle.evicted_since(version).tolist()) == sorted(present)

    @rule(batch=batches, seed=seeds, back=st.booleans())
    def gradient_after_eviction(self, batch, seed, back):
        """Half of a table's keys go between lookup and gradient; perhaps they come back as new rows."""
        pair = self.pair
        lookups, outputs = pair.forward(batch)
        looked_up = sorted(set(lookups["a"].occurrences) | set(lookups["b"].occurrences))
        gone = looked_up[1::2]
        pair.engine.table("one").evict_keys(torch.tensor(gone, dtype=torch.int64))
        pair.tables["one"].evict(gone)
        if back:
            pair.forward(batch)
        pair.update(pair.backward(lookups, outputs, seed), gone={"one": gone})

    @rule(batch=batches, seed=seeds, bad=st.sampled_from(["one", "two"]))
    def nan_gradient(self, batch, seed, bad):
        self.pair.update(self.pair.backward(*self.pair.forward(batch), seed, nan_in=bad))

    @rule()
    def move_to_a_fresh_engine(self):
        pair, old = self.pair, self.pair.engine
        rates = [group["lr"] for group in pair.opt.param_groups]
        saved = pair.opt.state_dict()
        pair.engine, pair.opt = pair.fresh()
        for name, table in pair.tables.items():
            pair.engine.table(name).load(old.table(name).snapshot())
            table.dropped = table.skipped = 0
        pair.opt.load_state_dict(saved)
        assert [group["lr"] for group in pair.opt.param_groups] == rates

    @precondition(lambda self: "adam" not in self.pair.optimizer_name)
    @rule(table=st.sampled_from(["one", "two"]))
    def clear(self, table):
        self.pair.engine.table(table).clear()
        self.pair.tables[table].evict(list(self.pair.tables[table].rows))

    @invariant()
    def same_rows(self):
        if hasattr(self, "pair"):
            self.pair.check()


TestTraining = Training.TestCase
