"""Statistics that the engine finds in data, and where they are kept."""

import json
import pickle
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from feature_helpers import ragged_text, same
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.features import Feature, FeatureEngine
from karvan.features.ops.fitted import Moments
from karvan.ragged import Ragged


def test_fit_finds_mean_and_standard_deviation_over_all_batches_without_nan():
    values = torch.randn(1000, dtype=torch.float64) * 7 + 1e6
    values[::10] = float("nan")
    engine = FeatureEngine(
        [Feature("p").normalise(), Feature("q").select("p").clip(0, 1), Feature("r").log1p().normalise()]
    )
    engine.fit({"p": part, "r": part.abs()} for part in values.split(77))
    known = values[~values.isnan()].numpy()
    statistics = {name: engine.get_extra_state()[name].numpy() for name in ("p", "r")}
    np.testing.assert_allclose(statistics["p"][0], known.mean(), rtol=1e-12)
    # A mean 1e5 times the deviation costs five digits; sums of squares would cost ten.
    np.testing.assert_allclose(statistics["p"][1], known.std(), rtol=1e-9)
    np.testing.assert_allclose(statistics["r"], [np.log1p(known).mean(), np.log1p(known).std()], rtol=1e-9)
    made = engine({"p": values, "r": values})["p"]
    assert abs(float(made.nanmean())) < 1e-6


def test_statistics_are_part_of_the_state_dict_and_not_of_the_modules_type():
    engine = FeatureEngine([Feature("p").normalise()]).fit([{"p": torch.rand(100) + 5}])
    model = torch.nn.Sequential(FeatureEngine([Feature("p").normalise()]))
    model.load_state_dict({f"0.{k}": v for k, v in engine.state_dict().items()})
    model.half()
    x = {"p": torch.rand(9)}
    assert same(model(x)["p"], engine(x)["p"])
    unfitted = FeatureEngine([Feature("p").normalise()])
    fresh = FeatureEngine([Feature("p").normalise()])
    fresh.load_state_dict(unfitted.state_dict())
    with pytest.raises(ValueError, match="Feature 'p', normalise: there are no statistics yet"):
        fresh(x)
    with pytest.raises(
        ValueError, match=r"'features' expects statistics of nothing, but received statistics of 'p'"
    ):
        FeatureEngine([Feature("p")]).load_state_dict(engine.state_dict())


def test_a_constant_column_becomes_zeros():
    engine = FeatureEngine([Feature("p").normalise()]).fit([{"p": torch.full((5,), 3.0)}])
    assert engine({"p": torch.full((2,), 3.0)})["p"].tolist() == [0, 0]


def test_what_cannot_be_fitted_is_an_error():
    x = [{"p": torch.rand(5)}]
    with pytest.raises(ValueError, match="but there is none"):
        FeatureEngine([Feature("p").normalise(0, 1)]).fit(x)
    with pytest.raises(ValueError, match="Feature 'p' has two steps to fit"):
        FeatureEngine([Feature("p").normalise().normalise()]).fit(x)
    with pytest.raises(ValueError, match="Feature 'q', normalise: cannot be fitted"):
        FeatureEngine([Feature("p").normalise(), Feature("q").select("p").normalise()]).fit(x)
    with pytest.raises(ValueError, match="Feature 'p', normalise: expected values to fit"):
        FeatureEngine([Feature("p").normalise()]).fit([])


def _moments(parts):
    found = Moments()
    for part in parts:
        found.add(torch.tensor(part, dtype=torch.float64))
    return found


DOUBLES = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1e3, 1e3, width=32)


@given(st.lists(DOUBLES, min_size=1, max_size=12), st.data())
def test_statistics_are_exact_and_the_same_however_the_data_is_shared_out(values, data):
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    whole = _moments([values])
    assert whole.mean == float(mean)
    if variance:
        assert Fraction(whole.std) ** 2 / variance - 1 < Fraction(1, 1 << 50)
    else:
        assert whole.std == 1.0

    shuffled = data.draw(st.permutations(values))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    shares = [shuffled[a:b] for a, b in pairwise([0, *cuts, len(values)])]
    merged = Moments()
    for share in shares:
        merged.merge(json.loads(json.dumps(_moments([share[:1], share[1:]]).state())))
    assert (merged.count, merged.mean, merged.std) == (whole.count, whole.mean, whole.std)


def test_values_of_another_kind_are_an_error_that_names_the_feature():
    with pytest.raises(TypeError, match=r"Feature 'p', fit: expected numbers, but received .*strings"):
        FeatureEngine([Feature("p").normalise()]).fit([{"p": ragged_text(["1"])}])
    with pytest.raises(TypeError, match="Feature 'p', fit: expected ids"):
        FeatureEngine([Feature("p").vocabulary()]).fit([{"p": torch.rand(2)}])
    with pytest.raises(ValueError, match="Feature 'p', fit: expected finite numbers"):
        FeatureEngine([Feature("p").normalise()]).fit([{"p": torch.tensor([1.0, float("inf")])}])


@given(st.lists(st.lists(st.sampled_from(["", "a", "b", "ab", "é", "B"]), max_size=6), max_size=4), st.data())
def test_a_fitted_vocabulary_has_the_most_frequent_words_first_whatever_their_order(batches, data):
    counts = Counter(word for batch in batches for word in batch if word)
    most, least = data.draw(st.none() | st.integers(1, 4)), data.draw(st.integers(1, 3))
    expected = sorted((w for w in counts if counts[w] >= least), key=lambda w: (-counts[w], w.encode()))
    feature = Feature("w").vocabulary(max_words=most, min_count=least, oov=2)
    shuffled = data.draw(st.permutations(batches))
    if not expected:
        with pytest.raises(ValueError, match=r"Feature 'w', vocabulary: expected words"):
            FeatureEngine([feature]).fit([{"w": ragged_text(batch)} for batch in shuffled])
        return
    engine = FeatureEngine([feature]).fit([{"w": ragged_text(batch)} for batch in shuffled])
    told = FeatureEngine([Feature("w").vocabulary(expected[:most], oov=2)])
    words = {"w": ragged_text(["", "a", "b", "ab", "é", "B", "other"])}
    assert same(engine(words)["w"], told(words)["w"])

    again = FeatureEngine([feature])
    again.load_state_dict(engine.state_dict())
    assert again.unfitted == []
    assert same(again(words)["w"], engine(words)["w"])


def test_a_vocabulary_of_ids_is_fitted_by_the_values_of_lists():
    engine = FeatureEngine([Feature("i").vocabulary(max_words=2), Feature("j").select("k").vocabulary()])
    assert engine.unfitted == ["i", "j"]
    lists = Ragged.from_lists([[5, -7], [], [-7, 3]])
    engine.fit([{"i": lists, "k": torch.tensor([1, 1, 0])}])
    assert engine({"i": lists, "k": torch.tensor([0, 1, 9])})["i"].to_lists() == [[2, 0], [], [0, 1]]
    assert pickle.loads(pickle.dumps(engine)).features == engine.features


def test_words_and_ways_to_find_them_exclude_each_other():
    with pytest.raises(ValueError, match="received both"):
        Feature("w").vocabulary(["a"], max_words=3)
    with pytest.raises(ValueError, match="min_count of at least 1"):
        Feature("w").vocabulary(min_count=0)
    with pytest.raises(ValueError, match="there are no words yet"):
        FeatureEngine([Feature("w").vocabulary()])({"w": ragged_text(["a"])})
    engine = FeatureEngine([Feature("w").vocabulary()])
    with pytest.raises(ValueError, match="Feature 'w', vocabulary: expected the words of a vocabulary"):
        engine.set_extra_state({**engine.get_extra_state(), "w": torch.zeros(2)})


def test_missing_values_do_not_count_when_steps_are_fitted():
    data = {"n": [1, None, 3], "city": ["a", None, "b"], "price": [1.0, None, 3.0]}
    features = [Feature("n").normalise(), Feature("price").normalise(), Feature("city").vocabulary()]
    engine = FeatureEngine(features).fit(kv.data.read(data, 2))
    (batch,) = kv.data.read(data, 3, transform=engine)
    assert batch["n"].to_lists() == [[-1.0], [], [1.0]]
    assert batch["price"].tolist()[::2] == [-1.0, 1.0]
    assert sorted(batch["city"].to_lists()) == [[], [0], [1]]


@pytest.mark.parametrize("data", ["clicks/", {"price": torch.ones(3)}])
def test_fit_says_that_it_wants_batches(data):
    engine = kv.FeatureEngine([kv.Feature("price").normalise()])
    with pytest.raises(TypeError, match=r"expects batches.*returns a str: pass kv\.data\.read"):
        engine.fit(data)


def _fitted(*features):
    return FeatureEngine(features).fit([{"p": torch.rand(100) * 9, "w": torch.arange(100) % 5}])


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        (
            [Feature("p").normalise()],
            [Feature("p").log1p().normalise()],
            ["p.normalise()", "p.log1p().normalise()"],
        ),
        (
            [Feature("p").clip(0, 5).log1p().normalise()],
            [Feature("p").clip(0, 6).log1p().normalise()],
            ["p.clip(0, 5).log1p().normalise()", "p.clip(0, 6).log1p().normalise()"],
        ),
        (
            [Feature("q").select("p").normalise()],
            [Feature("q").select("p").normalise(), Feature("p").log(2.0)],
            ["steps [p.log(2.0)].normalise()", "statistics of p.normalise()"],
        ),
        (
            [Feature("w").vocabulary(oov=2)],
            [Feature("w").vocabulary(oov=3)],
            ["w.vocabulary(None, 2)", "w.vocabulary(None, 3)"],
        ),
    ],
)
def test_statistics_of_other_steps_are_refused_with_both_shown(old, new, texts):
    state = _fitted(*old).state_dict()
    FeatureEngine(old).load_state_dict(state)
    with pytest.raises(ValueError, match="expects statistics of the steps") as caught:
        FeatureEngine(new).load_state_dict(state)
    assert all(text in str(caught.value) for text in texts)


def test_steps_after_the_fitted_one_may_change():
    engine = _fitted(Feature("p").normalise())
    FeatureEngine([Feature("p").normalise().clip(-3, 3)]).load_state_dict(engine.state_dict())


def test_the_description_of_steps_is_stable_text_also_for_numpys_numbers_and_many_values():
    engine = _fitted(Feature("p").clip(np.float64(1.0), np.int64(7)).normalise())
    assert engine.get_extra_state()["karvan.steps"] == {"p": "p.clip(1.0, 7).normalise()"}

    def steps(boundaries):
        chain = Feature("p").bucketize(boundaries).normalise()
        return FeatureEngine([chain]).get_extra_state()["karvan.steps"]["p"]

    assert steps(range(99)) == steps(range(99)) != steps(range(1, 100))
    assert len(steps(range(99))) < 80
