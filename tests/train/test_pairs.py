"""Batches that are pairs of features and labels, and losses and metrics of classes."""

import math
import pickle
from collections.abc import Mapping

import pair_programs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pair_programs import CLASSES, LOSS, net, pairs
from ranks_helpers import run

import karvan as kv
from karvan.train.feed import describe, empty
from karvan.train.types import Pair, as_batch, model_input, samples_of


def _trainer(model=None, **options):
    return kv.Trainer(
        model or net(),
        options.pop("loss", LOSS),
        dense_optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        progress="none",
        **options,
    )


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_fit_on_pairs_is_the_loop_that_one_would_write(kind):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for features, labels in pairs(0, [5, 3, 7]) * 2:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    trainer = _trainer()
    result = trainer.fit(pairs(0, [5, 3, 7], kind), epochs=2)
    assert result.samples == 30
    for name, value in model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value)


def test_a_data_loader_of_torch_gives_pairs_and_the_classifier_learns():
    features, labels = pairs(1, [400])[0]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features, labels), batch_size=50)
    trainer = _trainer(metrics={"accuracy": kv.metrics.ClassAccuracy()})
    trainer.fit(data, epochs=20)
    found = trainer.evaluate(data)
    assert found["accuracy"] > 0.9
    assert found["loss"] < 0.4
    assert [len(output) for output, _ in trainer.predict([features])] == [400]
    columns = [given["label"] for _, given in trainer.predict(data, columns=["label"])]
    assert torch.equal(torch.cat(columns), labels)


def test_features_may_have_names_as_may_labels():
    class Clicks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = kv.EmbeddingEngine({"user": kv.Table(4)})
            self.top = torch.nn.Linear(4, CLASSES)

        def forward(self, batch):
            assert set(batch) == {"user"}
            return self.top(self.embeddings(batch)["user"])

    batch = ({"user": torch.arange(6) % 3}, {"kind": torch.arange(6) % 3})
    loss = kv.losses.CrossEntropy(label="kind")
    trainer = _trainer(
        Clicks(),
        loss=loss,
        sparse_optimizer=kv.optim.Adagrad(lr=0.5),
        metrics={"accuracy": kv.metrics.ClassAccuracy(label="kind")},
    )
    trainer.fit([batch] * 20)
    assert trainer.evaluate([batch])["accuracy"] == 1


def test_two_ranks_train_what_one_process_trains():
    alone = {"fit": pair_programs.fit(2), "loop": pair_programs.loop(2)}
    results = run(2, "pair_programs:both")
    for made in results:
        for name, value in alone["fit"]["dense"].items():
            for each in (made["fit"]["dense"][name], made["loop"][name], alone["loop"][name]):
                torch.testing.assert_close(each, value)
        for name in ("loss", "accuracy", "mean"):
            assert made["fit"]["metrics"][name] == pytest.approx(alone["fit"]["metrics"][name], abs=1e-6)
        assert made["fit"]["samples"] == alone["fit"]["samples"] == 81
    log = results[0]["fit"]["log"]  # rank 0 writes those of all
    for (kind, values), (wanted, numbers) in zip(log, alone["fit"]["log"], strict=True):
        assert kind == wanted
        assert values["mean"] == pytest.approx(numbers["mean"], abs=1e-6)
    assert any(isinstance(values["large"], float) for _, values in log)  # only some batches report it
    assert [made["fit"]["predicted"] for made in results] == [17, 10]
    assert alone["fit"]["predicted"] == 27


def test_a_pair_is_a_tuple_and_a_mapping_and_an_empty_one_has_its_form():
    features, labels = torch.zeros(2, 3), torch.ones(2, dtype=torch.int64)
    batch = as_batch([features, labels])
    assert isinstance(batch, Mapping)
    first, second = batch
    assert first is features is batch[0] is batch["features"] is model_input(batch)
    assert second is labels is batch[1] is batch.get("label")
    assert dict(**batch) == {"features": features, "label": labels}
    assert "label" in batch
    assert "other" not in batch
    assert samples_of(batch) == samples_of((features, labels)) == 2
    assert repr(pickle.loads(pickle.dumps(batch))) == repr(batch) == "Pair(features, label)"
    for pair in (batch, as_batch(features), as_batch(({"a": features}, labels)), as_batch([features])):
        made = empty(describe(pair))
        assert isinstance(made, Pair)
        assert list(made.keys()) == list(pair.keys())
        assert samples_of(made) == 0
        assert all(made[name].shape[1:] == pair[name].shape[1:] for name in pair.keys())  # noqa: SIM118


def test_a_transform_may_give_pairs_of_rows_of_ids():
    rows = [[1, 2], [], [3], [1, 1, 1]] * 3
    data = {"items": rows, "label": torch.arange(12) % CLASSES}

    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = kv.EmbeddingEngine({"item": kv.Table(4, combiner="sum")})
            self.top = torch.nn.Linear(4, CLASSES)

        def forward(self, items):
            return self.top(self.embeddings({"item": items})["item"])

    batches = kv.data.read(data, 5, transform=lambda batch: (batch["items"], batch["label"]))
    assert [as_batch(pair).samples for pair in batches] == [5, 5, 2]
    trainer = _trainer(Bag(), sparse_optimizer=kv.optim.SGD(lr=0.5))
    assert trainer.fit(batches, epochs=2).samples == 24
    outputs = torch.cat([output for output, _ in trainer.predict(batches)])
    expected = trainer.model(kv.Ragged.from_lists(rows))
    assert torch.allclose(outputs, expected)


def test_what_is_no_pair_is_refused():
    with pytest.raises(TypeError, match=r"or a pair of tensors \(features, labels\), got tuple"):
        samples_of((torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    with pytest.raises(ValueError, match="equally many of each, got 2 in 'features' and 3 in 'label'"):
        _trainer().fit([(torch.zeros(2, 4), torch.zeros(3))])
    with pytest.raises(ValueError, match="expects different names in both, got 'label' twice"):
        as_batch(({"label": torch.zeros(2)}, torch.zeros(2)))
    with pytest.raises(KeyError, match="no column 'click' in the batch, which has: features, label"):
        _trainer(loss=kv.losses.CrossEntropy(label="click")).fit(pairs(0, [4]))


@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 9999), st.booleans())
def test_cross_entropy_is_minus_the_logarithm_of_the_class_probability(count, classes, seed, weighted):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, classes, generator=random) * 5
    labels = torch.randint(classes, (count,), generator=random)
    weights = torch.rand(count, generator=random)
    batch = {"label": labels.reshape(-1, 1).float(), "w": weights}
    made = kv.losses.CrossEntropy(weight="w" if weighted else None, classes=classes)(scores, batch)
    each = [
        math.log(sum(math.exp(s - max(row)) for s in row)) + max(row) - row[label]
        for row, label in zip(scores.tolist(), labels.tolist(), strict=True)
    ]
    factors = weights.tolist() if weighted else [1.0] * count
    expected = sum(e * w for e, w in zip(each, factors, strict=True)) / sum(factors)
    assert float(made) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.0, 3.0], "has 1 of 2 labels outside of 0 to 2, such as 3, .*: number classes from 0 on"),
        ([0.0, -1.0], "has 1 of 2 labels outside of 0 to 2, such as -1"),
        ([0.0, 0.5], "has labels such as 0.5, but CrossEntropy needs whole numbers: the numbers of classes"),
        ([0.0, math.nan], "has NaN in 1 of 2 samples"),
    ],
)
def test_labels_that_are_no_classes_are_an_error_before_the_step(labels, message):
    trainer = _trainer()
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ValueError, match=message):
        trainer.fit([(torch.zeros(2, 4), torch.tensor(labels))])
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_logits_and_labels_that_do_not_match():
    loss = kv.losses.CrossEntropy()
    with pytest.raises(
        ValueError, match="labels from 1 to 4, but the model gives logits of 3 classes, 0 to 2"
    ):
        loss(torch.zeros(2, 3), {"label": torch.tensor([1, 4])})
    with pytest.raises(ValueError, match=r"an output of shape \(samples, classes\), got \[2\]"):
        loss(torch.zeros(2), {"label": torch.tensor([1, 1])})
    with pytest.raises(ValueError, match="expects 3 logits"):
        LOSS(torch.zeros(2, 4), {"label": torch.tensor([1, 1])})
    with pytest.raises(ValueError, match="at least 2 classes, got 1"):
        kv.losses.CrossEntropy(classes=1)


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9999))
def test_accuracy_over_classes_is_how_often_the_class_is_among_the_highest(count, classes, top, seed):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(3, (count, classes), generator=random).float()
    labels = torch.randint(-1, classes + 1, (count,), generator=random)
    weights = torch.rand(count, generator=random)
    whole, parts = (kv.metrics.ClassAccuracy(top, weight="w") for _ in range(2))
    whole.update(scores, {"label": labels, "w": weights})
    for part in range(2):
        one = kv.metrics.ClassAccuracy(top, weight="w")
        one.update(scores[part::2], {"label": labels[part::2], "w": weights[part::2]})
        parts.merge(one.state())
    right = total = 0.0
    for row, label, weight in zip(scores.tolist(), labels.tolist(), weights.tolist(), strict=True):
        best = sorted(range(classes), key=lambda i: (-row[i], i))[:top]
        right, total = right + weight * (label in best), total + weight
    expected = right / total if total else math.nan
    assert whole.compute() == pytest.approx(expected, nan_ok=True)
    assert parts.compute() == pytest.approx(expected, nan_ok=True)


def test_what_accuracy_over_classes_refuses_and_makes_of_nan():
    metric = kv.metrics.ClassAccuracy()
    metric.update(torch.tensor([[1.0, math.nan]]), {"label": torch.tensor([0])})
    assert math.isnan(metric.compute())
    with pytest.raises(ValueError, match="a score for each sample and class, got shape"):
        metric.update(torch.zeros(2, 2, 2), {"label": torch.zeros(2)})
    with pytest.raises(ValueError, match="Expected 2 labels, one for each sample, got"):
        metric.update(torch.zeros(2, 3), {"label": torch.zeros(6)})
    with pytest.raises(ValueError, match="top of at least 1, got 0"):
        kv.metrics.ClassAccuracy(0)
