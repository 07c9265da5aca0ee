"""The engine against the slow reference: every combiner, dtype and optimizer, over random operations."""

import itertools
import random

import pytest
import reference as ref
import torch
from engine_pair import KEYS, Pair, combiners, random_rows, tensor_of, weigh
from few_examples import few_examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_kinds import also_slowly

DIM = 3
COMBINERS = combiners(DIM)

keys = st.sampled_from(KEYS)
ids = st.lists(st.lists(keys, max_size=4), min_size=3, max_size=3).filter(any)


# Every optimizer has every dtype below, with some combiners.
@pytest.mark.parametrize("optimizer", also_slowly(ref.OPTIMIZERS, {"adagrad-row", "adam-l2", "ftrl"}))
def test_all_combiners_weights_and_dtypes_in_one_engine(optimizer):
    features, dtypes, weighted = {}, {}, {}
    for (name, feature), dtype, with_weights in itertools.product(
        COMBINERS.items(), ref.DTYPES, (False, True)
    ):
        label = f"{name} {dtype} {with_weights}"
        features[label], dtypes[label], weighted[label] = feature, dtype, with_weights
    pair, source = Pair(features, optimizer, dtypes=dtypes), random.Random(optimizer)
    for seed in range(2):
        rows = {name: random_rows(source) for name in features}
        pair.train({n: (r, weigh(r, seed) if weighted[n] else None) for n, r in rows.items()}, seed)


# These differ from the others in what does not depend on the dtype.
SIMILAR = {"sgd-nesterov", "adamw-amsgrad", "ftrl-tf"}
STEPS = [
    pytest.param(
        name,
        dtype,
        marks=[pytest.mark.slow] if name in SIMILAR and dtype is not torch.float32 else [],
        id=f"{name}-{dtype}",
    )
    for name, dtype in itertools.product(ref.OPTIMIZERS, ref.DTYPES)
]


@pytest.mark.parametrize(("optimizer", "dtype"), STEPS)
@few_examples(4)
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
