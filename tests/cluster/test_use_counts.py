"""Use counts of checkpoints are those of trained batches, however far lookups have run ahead."""

import numpy as np
import pytest
import torch
from cluster_helpers import serving
from torch.nn import functional as F

import karvan as kv
from karvan.checkpoint.manifest import WHOLE
from karvan.checkpoint.table_files import read_extras

KEYS = 40


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = kv.EmbeddingEngine(
            {
                "rare": kv.Table(2, admit=kv.admission.MinCount(2, slots=1 << 16)),
                "some": kv.Table(2, admit=kv.admission.Probability(0.5)),
                "all": kv.Table(2),
            },
            seed=2,
        )
        self.out = torch.nn.Linear(6, 1)

    def forward(self, batch):
        vectors = self.embeddings(batch)
        return self.out(torch.cat([vectors[name] for name in ("rare", "some", "all")], 1)).squeeze(1)


def batches(count=14, rows=8, first=0):
    draw = np.random.default_rng(5)
    made = []
    for _ in range(first + count):
        keys = {name: torch.from_numpy(draw.integers(0, KEYS, rows)) for name in ("rare", "some", "all")}
        made.append({**keys, "label": torch.from_numpy(draw.integers(0, 2, rows)).float()})
    return made[first:]


def loss(output, batch):
    return F.binary_cross_entropy_with_logits(output, batch["label"])


def trainer_of(folder, **options):
    return kv.Trainer(
        Net(),
        loss,
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        sparse_optimizer=kv.optim.SGD(lr=0.05),
        progress="none",
        checkpoints=kv.Checkpoints(folder, keep_last=None, full_every=options.pop("full_every", 1)),
        checkpoint_every=3,
        checkpoint_seconds=None,
        **options,
    )


def uses(checkpoint):
    """Of each table its keys with counts and last uses, and the counters of its filter."""
    found = {}
    for name, table in checkpoint.manifest.tables.items():
        rows = [np.concatenate(column) for column in zip(*checkpoint.parts(name), strict=True)]
        order = rows[0].argsort()
        extra = read_extras(checkpoint.path, table.extras, WHOLE).get("filter_counts")
        counters = None if extra is None else extra.tolist()
        found[name] = rows[0][order].tolist(), rows[3][order].tolist(), rows[4][order].tolist(), counters
    return found


def uses_by_step(folder):
    return {one.step: uses(one) for one in kv.Checkpoints(folder).list()}


def live_counts(trainer):
    found = {}
    for table in trainer.model.embeddings.tables():
        rows = trainer.model.embeddings.store.table(table.name).snapshot()
        order = rows.keys.argsort()
        found[table.name] = rows.keys[order].tolist(), rows.counts[order].tolist()
    return found


@pytest.fixture
def in_memory(tmp_path):
    def run(work, **options):
        kv.connect("memory")
        trainer = trainer_of(tmp_path / "memory", **options)
        work(trainer)
        return uses_by_step(tmp_path / "memory"), live_counts(trainer)

    return run


@pytest.fixture
def hybrid(tmp_path):
    def run(work, mode="hybrid", servers=2, **options):
        with serving(servers) as addresses:
            kv.connect("remote", servers=addresses, mode=mode, staleness=4)
            trainer = trainer_of(tmp_path / "hybrid", **options)
            work(trainer)
            assert trainer.model.embeddings.store.staleness.most > 1  # lookups did run ahead
            return uses_by_step(tmp_path / "hybrid"), live_counts(trainer)

    return run


@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_every_checkpoint_has_the_counts_of_memory(in_memory, hybrid, mode):
    expected = in_memory(lambda trainer: trainer.fit(batches()))
    assert hybrid(lambda trainer: trainer.fit(batches()), mode) == expected
    assert len(expected[0]) > 3


def test_deltas_have_them_too(in_memory, hybrid):
    expected = in_memory(lambda trainer: trainer.fit(batches()))
    assert hybrid(lambda trainer: trainer.fit(batches()), full_every=4) == expected


def test_lookups_for_batches_that_a_fit_did_not_reach_are_withdrawn(in_memory, hybrid):
    def work(trainer):
        trainer.fit(batches(), max_steps=5)
        trainer.fit(batches(), max_steps=10)

    assert hybrid(work) == in_memory(work)


def test_gradient_accumulation_and_evaluation(in_memory, hybrid):
    def work(trainer):
        trainer.fit(batches())
        trainer.evaluate(batches(5))

    expected = in_memory(work, gradient_accumulation_steps=2)
    assert hybrid(work, gradient_accumulation_steps=2) == expected


def test_batches_whose_gradients_are_not_finite_count(in_memory, hybrid):
    def work(trainer):
        made = batches()
        for number in (2, 7):
            made[number]["label"] = torch.full_like(made[number]["label"], float("nan"))
        trainer.fit(made)

    assert hybrid(work) == in_memory(work)


def test_forwards_without_a_gradient_count_when_they_are_done(tmp_path):
    """An engine that nobody optimizes counts its uses in training, as it does in memory."""
    expected = None
    for kind in ("memory", "remote"):
        with serving(2) as addresses:
            if kind == "remote":
                kv.connect("remote", servers=addresses, mode="hybrid", staleness=4)
            else:
                kv.connect("memory")
            engine = kv.EmbeddingEngine({"all": kv.Table(2)})
            for batch in batches(4):
                engine({"all": batch["all"]})
            kept = engine({"all": torch.arange(3)})  # which a save must count, though it is not done with
            saved = kv.Checkpoints(tmp_path / kind).save(1, {}, engine).wait()
            found = uses(saved)
            del kept
        expected = expected or found
        assert found == expected


def test_a_rollback_repeats_lookups_without_counting_them_twice(tmp_path, in_memory):
    expected = in_memory(lambda trainer: trainer.fit(batches()))[0]
    for steps in (4, 8, None):  # each time servers that know nothing, as after a rollback
        with serving(2) as addresses:
            kv.connect("remote", servers=addresses, mode="hybrid", staleness=4)
            trainer = trainer_of(tmp_path / "rolled")
            trainer.fit(batches(), **({} if steps is None else {"max_steps": steps}))
    found = uses_by_step(tmp_path / "rolled")
    assert found[14] == expected[14]
