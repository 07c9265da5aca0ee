"""Metrics against scikit-learn, within the errors they state."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan import metrics
from karvan.metrics.ranking import count_scores

nan = float("nan")


@pytest.fixture(scope="module", autouse=True)
def _scikit_learn():
    """Imported by the process that runs these tests, as it takes seconds."""
    global sk
    from sklearn import metrics as sk


@st.composite
def samples(draw):
    """Scores, labels, weights: logits around any centre, so all scores may be tiny, with or without ties."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 400))
    logits = random.normal(draw(st.floats(-8, 8)), draw(st.sampled_from([0.2, 1.0, 6.0])), size)
    if draw(st.booleans()):
        logits = np.round(logits, 1)
    labels = (random.random(size) < draw(st.floats(0.02, 0.98))).astype(np.float64)
    weights = random.gamma(1.0, 1.0, size) + 1e-3
    return 1 / (1 + np.exp(-logits)), labels, weights


def _add(metric, scores, labels, weights=None, groups=None):
    arrays = [
        None if a is None else torch.from_numpy(np.asarray(a)) for a in (scores, labels, weights, groups)
    ]
    metric.add(*arrays)
    return metric


def _expected(function, *arrays, **options):
    return function(*arrays, **options) if len(set(arrays[0])) == 2 else nan


def _same(value, expected, tolerance=1e-9):
    return math.isnan(value) if math.isnan(expected) else abs(value - expected) <= tolerance


@given(samples())
def test_exact_auc_is_scikit_learns(drawn):
    scores, labels, weights = drawn
    assert _same(
        _add(metrics.AUC(exact=True), scores, labels).compute(), _expected(sk.roc_auc_score, labels, scores)
    )
    weighted = _expected(sk.roc_auc_score, labels, scores, sample_weight=weights)
    assert _same(_add(metrics.AUC(exact=True), scores, labels, weights).compute(), weighted)


@given(samples(), st.sampled_from([2, 64, 2**16]))
def test_histogram_auc_is_within_its_bound_of_scikit_learns(drawn, bins):
    scores, labels, weights = drawn
    for w in (None, weights):
        auc = _add(metrics.AUC(bins=bins), scores, labels, w)
        expected = _expected(sk.roc_auc_score, labels, scores, sample_weight=w)
        assert math.isnan(expected) or auc.error_bound() <= 0.5
        assert _same(auc.compute(), expected, auc.error_bound() + 1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_native_histogram_is_torchs(weighted):
    random = torch.Generator().manual_seed(3)
    scores = torch.randn(5000, generator=random, dtype=torch.float64).mul(6).sigmoid()
    scores[:8] = torch.tensor([0.0, 1.0, -0.1, 1.5, math.nan, math.inf, 5e-324, 1 - 2**-53])
    labels = torch.rand(5000, generator=random, dtype=torch.float64)
    labels[8:11] = torch.tensor([-1.0, 2.0, math.nan])
    weights = torch.rand(5000, generator=random, dtype=torch.float64) if weighted else None
    native, expected = metrics.AUC(bins=100), torch.zeros(3, 102, dtype=torch.float64)
    native.add(scores, labels, weights)
    count_scores(scores, labels, weights, expected)
    torch.testing.assert_close(native.state()["counts"], expected, equal_nan=True)


@pytest.mark.parametrize("centre", [-7.0, -3.5, 0.0, 3.5], ids="rate of {}".format)
def test_histogram_auc_of_many_samples_is_close_however_rare_clicks_are(centre):
    random = np.random.default_rng(0)
    logits = random.normal(centre, 1.0, 200_000)
    scores = 1 / (1 + np.exp(-logits))
    labels = (random.random(len(scores)) < scores).astype(np.float64)
    auc = _add(metrics.AUC(), scores.astype(np.float32), labels)
    assert auc.error_bound() < 1e-4
    assert abs(auc.compute() - sk.roc_auc_score(labels, scores)) < 2e-5


@given(samples())
def test_sums_are_scikit_learns(drawn):
    scores, labels, weights = drawn
    for w in (None, weights):
        options = {"sample_weight": w}
        pairs = [
            (metrics.BinaryCrossEntropy(), sk.log_loss(labels, scores, labels=[0, 1], **options)),
            (metrics.Accuracy(), sk.accuracy_score(labels, scores >= 0.5, **options)),
            (metrics.Accuracy(0.1), sk.accuracy_score(labels, scores >= 0.1, **options)),
            (metrics.MeanSquaredError(), sk.mean_squared_error(labels, scores, **options)),
            (metrics.MeanAbsoluteError(), sk.mean_absolute_error(labels, scores, **options)),
        ]
        for metric, expected in pairs:
            assert _add(metric, scores, labels, w).compute() == pytest.approx(expected, abs=1e-9)
        weight = np.ones_like(scores) if w is None else w
        clicks = (weight * labels).sum()
        expected = (weight * scores).sum() / clicks if clicks else nan
        assert _add(metrics.Calibration(), scores, labels, w).compute() == pytest.approx(
            expected, nan_ok=True
        )


def test_log_loss_of_a_wrong_certainty_is_scikit_learns():
    scores, labels = np.array([0.0, 1.0, 1.0]), np.array([1.0, 0.0, 1.0])
    assert _add(metrics.BinaryCrossEntropy(), scores, labels).compute() == pytest.approx(
        sk.log_loss(labels, scores)
    )


def _grouped(function, groups, *arrays):
    """A list of (size, value) for each group."""
    chosen = [groups == g for g in np.unique(groups)]
    return [function(*(a[c] for a in arrays)) for c in chosen]


groups_of = st.sampled_from([1, 3, 40])


@given(samples(), groups_of)
def test_gauc_is_the_mean_of_scikit_learns_aucs_over_all_groups(drawn, count):
    scores, labels, weights = drawn
    groups = np.random.default_rng(1).integers(-count, count, len(scores))
    for w in (np.ones_like(scores), weights):
        each = _grouped(
            lambda s, y, v: (
                (v.sum(), sk.roc_auc_score(y, s, sample_weight=v)) if len(set(y)) == 2 else (0.0, nan)
            ),
            groups,
            scores,
            labels,
            w,
        )
        known = [(size, value) for size, value in each if not math.isnan(value)]
        gauc = _add(metrics.GAUC(), scores, labels, w, groups)
        expected = sum(s * v for s, v in known) / sum(s for s, _ in known) if known else nan
        assert _same(gauc.compute(), float(expected))
        assert gauc.groups == len(each)
        assert gauc.undefined_groups == len(each) - len(known)


@given(samples(), groups_of)
def test_gauc_by_clicks_weighs_groups_by_their_positive_labels(drawn, count):
    scores, labels, weights = drawn
    groups = np.random.default_rng(1).integers(-count, count, len(scores))
    each = _grouped(
        lambda s, y, v: (v @ y, sk.roc_auc_score(y, s, sample_weight=v) if len(set(y)) == 2 else nan),
        groups,
        scores,
        labels,
        weights,
    )
    known = [(clicks, value) for clicks, value in each if not math.isnan(value)]
    gauc = _add(metrics.GAUC(weighting="clicks"), scores, labels, weights, groups)
    total, weight = sum(c * v for c, v in known), sum(c for c, _ in known)
    assert gauc.totals() == pytest.approx((total, weight))
    assert _same(gauc.compute(), float(total / weight) if known else nan)


def test_gauc_refuses_other_weightings():
    with pytest.raises(ValueError, match="expects weighting 'impressions' or 'clicks', got 'users'"):
        metrics.GAUC(weighting="users")


@given(samples(), groups_of, st.sampled_from([1, 2, 5, 1000]))
def test_ndcg_is_the_mean_of_scikit_learns(drawn, count, k):
    scores, labels, _ = drawn
    random = np.random.default_rng(1)
    labels = labels * random.integers(1, 4, len(labels))  # graded relevance
    groups = random.integers(0, count, len(scores))

    def ndcg(s, y):
        if not y.any():
            return nan
        return sk.ndcg_score([y], [s], k=k) if len(y) > 1 else 1.0  # sklearn refuses single documents

    each = _grouped(ndcg, groups, scores, labels)
    metric = _add(metrics.NDCG(k), scores, labels, None, groups)
    known = [v for v in each if not math.isnan(v)]
    assert _same(metric.compute(), np.mean(known) if known else nan)
    assert metric.undefined_groups == len(each) - len(known)


@given(samples(), groups_of, st.sampled_from([1, 2, 5, 1000]))
def test_hit_rate_is_the_expected_share_of_groups_with_a_hit(drawn, count, k):
    scores, labels, _ = drawn
    groups = np.random.default_rng(1).integers(0, count, len(scores))

    def hit(s, y):
        """By definition: the chance over orders of ties, from counting."""
        if not y.any():
            return nan
        edge = np.sort(s)[::-1][min(k, len(s)) - 1]
        if y[s > edge].any():
            return 1.0
        tied = y[s == edge]
        places = min(k, len(s)) - int((s > edge).sum())
        return 1 - math.comb(int((tied == 0).sum()), places) / math.comb(len(tied), places)

    known = [v for v in _grouped(hit, groups, scores, labels) if not math.isnan(v)]
    metric = _add(metrics.HitRate(k), scores, labels, None, groups)
    assert _same(metric.compute(), np.mean(known) if known else nan, 1e-8)


def test_groups_of_ranking_metrics_count_by_the_mean_weight_of_their_samples():
    hits = metrics.HitRate(1)
    hits.add(
        torch.tensor([0.9, 0.1, 0.9, 0.1]),
        torch.tensor([1, 0, 0, 1]),
        torch.tensor([1.0, 2.0, 3.0, 6.0]),
        torch.tensor([5, 5, 6, 6]),
    )
    assert hits.compute() == pytest.approx(1.5 / (1.5 + 4.5))


def test_the_mean_of_losses_is_weighted_by_what_is_given():
    mean = metrics.Mean()
    mean.add(torch.tensor(1.0), weights=torch.tensor(3))
    mean.add(torch.tensor(5.0), weights=torch.tensor(1))
    assert mean.compute() == 2.0
    mean.reset()
    mean.update(torch.tensor([2.0, 4.0]), {})
    assert mean.compute() == 3.0


def test_all_metrics_are_exported_with_a_direction():
    assert kv.metrics is metrics
    higher = {
        name
        for name in metrics.__all__
        if name not in ("Metric", "State") and getattr(metrics, name).higher_is_better
    }
    assert higher == {"AUC", "GAUC", "NDCG", "HitRate", "Accuracy", "ClassAccuracy"}


@pytest.mark.parametrize(
    "metric", [metrics.AUC(), metrics.AUC(exact=True), metrics.BinaryCrossEntropy(), metrics.GAUC()]
)
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_mean_nothing_are_an_error(metric, weight):
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="Sample weights must be finite and not negative"):
        metric.add(ones / 2, ones, torch.tensor([1.0, weight, 0.0]), torch.arange(3))
