"""Metrics as streams: batches, ranks, states, devices and wrong input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan import metrics

MAKERS = {
    "AUC": metrics.AUC,
    "exact AUC": lambda **names: metrics.AUC(exact=True, **names),
    "GAUC": metrics.GAUC,
    "NDCG": metrics.NDCG,
    "HitRate": lambda **names: metrics.HitRate(2, **names),
    "BinaryCrossEntropy": metrics.BinaryCrossEntropy,
    "Calibration": metrics.Calibration,
    "Accuracy": metrics.Accuracy,
    "MeanSquaredError": metrics.MeanSquaredError,
    "MeanAbsoluteError": metrics.MeanAbsoluteError,
}


def _batch(rows, seed=0):
    random = torch.Generator().manual_seed(seed)
    return kv.Batch(
        {
            "label": torch.randint(2, (rows,), generator=random),
            "user": torch.randint(12, (rows,), generator=random),
            "w": torch.rand(rows, generator=random),
        }
    ), torch.randn(rows, generator=random).round(decimals=1)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_selection_is_all_that_an_update_needs(maker):
    """It can be counted elsewhere, as by another trainer."""
    batch, output = _batch(50)
    one, other = MAKERS[maker](weight="w"), MAKERS[maker](weight="w")
    one.update(output, batch)
    selection = other.select(output, batch)
    del batch, output
    other.add_selection(selection)
    assert one.state().keys() == other.state().keys()
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())


def test_a_selection_of_tensors_that_do_not_fit_is_an_error():
    batch, output = _batch(50)
    with pytest.raises(ValueError, match=r"Expected 49 labels, one for each score, got \(50,\)"):
        metrics.AUC().select(output[1:], batch)
    with pytest.raises(TypeError, match=r"GAUC expects groups of integers, got torch\.float32"):
        metrics.GAUC(group="w").select(output, batch)


def _rows(batch, chosen):
    return kv.Batch({name: entry[chosen] for name, entry in batch.items()})


@pytest.mark.parametrize("name", MAKERS)
@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 2**20), st.booleans())
def test_any_split_over_batches_and_ranks_merges_to_all_in_one(name, rows, ranks, seed, weighted):
    names = {"weight": "w"} if weighted else {}
    batch, output = _batch(rows, seed)
    whole = MAKERS[name](**names)
    whole.update(output, batch)
    random = np.random.default_rng(seed)
    owner, turn = random.integers(ranks, size=rows), random.integers(3, size=rows)
    merged = MAKERS[name](**names)
    for rank in range(ranks):
        there = MAKERS[name](**names)
        for batch_number in range(3):  # some are empty
            chosen = torch.from_numpy(np.flatnonzero((owner == rank) & (turn == batch_number)))
            there.update(output[chosen], _rows(batch, chosen))
        merged.merge(there.state())
    assert merged.compute() == pytest.approx(whole.compute(), abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_restores_a_metric_and_is_no_view_of_it(name):
    batch, output = _batch(50)
    metric, other = MAKERS[name](), MAKERS[name]()
    metric.update(output, batch)
    state, value = metric.state(), metric.compute()
    assert all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in state.values())
    metric.update(output, _batch(50, seed=1)[0])
    other.update(output, batch)
    other.load_state(state)
    assert other.compute() == value
    metric.reset()
    assert math.isnan(metric.compute())
    assert other.compute() == value


@pytest.mark.parametrize("name", MAKERS)
def test_no_samples_are_nan_and_a_nan_score_is_seen(name):
    metric = MAKERS[name]()
    assert math.isnan(metric.compute())
    batch, output = _batch(50)
    metric.update(output[:0], _rows(batch, torch.arange(0)))
    assert math.isnan(metric.compute())
    output[7] = float("nan")
    metric.update(output, batch)
    assert math.isnan(metric.compute())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_outputs_of_any_dtype_and_shape_give_the_number_of_their_values(name, dtype):
    batch, output = _batch(64)
    output = output.to(dtype)
    direct, column = MAKERS[name](), MAKERS[name](output="ctr")
    direct.update(output.double(), batch)
    column.update({"ctr": output.unsqueeze(1).requires_grad_()}, {**batch, "label": batch["label"].bool()})
    assert column.compute() == direct.compute()
    assert not any(t.requires_grad for t in column.state().values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MAKERS)
def test_tensors_on_a_gpu_give_the_same_number(name):
    batch, output = _batch(64)
    here, there = MAKERS[name](weight="w"), MAKERS[name](weight="w")
    here.update(output, batch)
    there.update(output.cuda(), batch.to("cuda"))
    there.update(output, batch)
    here.update(output, batch)
    assert there.compute() == pytest.approx(here.compute(), abs=1e-12)


def test_one_class_has_no_auc():
    for auc in (metrics.AUC(), metrics.AUC(exact=True)):
        auc.add(torch.rand(10), torch.ones(10))
        assert math.isnan(auc.compute())


def test_auc_takes_logits_or_probabilities_and_says_when_it_is_given_the_wrong_ones():
    batch, output = _batch(200)
    logits, probabilities = metrics.AUC(), metrics.AUC(logits=False)
    logits.update(output, batch)
    probabilities.update(output.double().sigmoid(), batch)
    assert logits.compute() == probabilities.compute()
    probabilities.update(output, batch)
    with pytest.raises(ValueError, match=r"from 0 to 1, but \d+ samples had others"):
        probabilities.compute()
    labels = metrics.AUC()
    labels.add(torch.tensor([0.5]), torch.tensor([-1]))
    with pytest.raises(ValueError, match="1 samples"):
        labels.compute()


def test_wrong_input_is_named():
    batch, output = _batch(8)
    with pytest.raises(KeyError, match="AUC expects the label 'click' in the batch, which has: label, u"):
        metrics.AUC(label="click").update(output, batch)
    with pytest.raises(ValueError, match="output=, the name of one of the model's outputs: ctr, cvr"):
        metrics.AUC().update({"ctr": output, "cvr": output}, batch)
    with pytest.raises(KeyError, match="no output 'cvr' among the model's: ctr"):
        metrics.AUC(output="cvr").update({"ctr": output}, batch)
    with pytest.raises(ValueError, match="expects an output 'cvr', but the model gave one tensor"):
        metrics.AUC(output="cvr").update(output, batch)
    with pytest.raises(ValueError, match=r"Expected 8 labels, one for each score, got \(7,\)"):
        metrics.AUC().add(output.sigmoid(), torch.ones(7))
    with pytest.raises(ValueError, match=r"GAUC\.add expects groups"):
        metrics.GAUC().add(output, batch["label"])
    with pytest.raises(TypeError, match=r"groups of integers, got torch\.float32"):
        metrics.GAUC().add(output, batch["label"], groups=output)
    with pytest.raises(TypeError, match="to be a tensor with one value per sample, got list"):
        metrics.AUC().update(output, {"label": [1] * 8})
    with pytest.raises(
        TypeError, match=r"the group 'user' .* got lists or strings\. .*Feature\('user'\)\.hash"
    ):
        metrics.GAUC("user").update(
            output, {"label": batch["label"], "user": kv.Ragged.from_lists([[65]] * 8)}
        )
    with pytest.raises(ValueError, match="at least 2 bins, got 1"):
        metrics.AUC(bins=1)
    with pytest.raises(ValueError, match="k of at least 1, got 0"):
        metrics.NDCG(0)


def test_a_state_of_other_settings_is_refused_and_changes_nothing():
    batch, output = _batch(50)
    auc = metrics.AUC(bins=100)
    auc.update(output, batch)
    value = auc.compute()
    for other in (metrics.AUC(bins=10), metrics.AUC(exact=True), metrics.BinaryCrossEntropy()):
        for take in (auc.merge, auc.load_state):
            with pytest.raises(ValueError, match=r"bins|A state of AUC has counts; got"):
                take(other.state())
    assert auc.compute() == value
    sample = metrics.GAUC()
    with pytest.raises(ValueError, match="entries of one length"):
        sample.merge({**metrics.GAUC().state(), "scores": torch.ones(1)})
