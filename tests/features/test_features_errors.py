"""What is refused, and in which words."""

from dataclasses import replace

import pytest
import torch
from feature_helpers import ragged_text

from karvan.features import Feature, FeatureEngine
from karvan.ragged import NestedRagged, OptionalRagged, Ragged


def test_a_missing_column_is_named():
    with pytest.raises(
        KeyError, match="Feature 'x' needs column 'item', which is not in the batch; it has: user"
    ):
        FeatureEngine([Feature("x").cross("user", "item")])({"user": torch.tensor([1])})


@pytest.mark.parametrize(("entry", "kind"), [([1, 2], "list"), (torch.tensor(1), "0-D Tensor")])
def test_an_entry_of_no_known_kind_is_refused(entry, kind):
    with pytest.raises(TypeError, match=f"Feature 'x' expects column 'x' to be .*, but it is a {kind}"):
        FeatureEngine([Feature("x").mod(3)])({"x": entry})


def test_two_results_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="'x' comes from feature 'x' and from feature 'x'"):
        FeatureEngine([Feature("x"), Feature("x").mod(2)])
    with pytest.raises(ValueError, match="'x_1' comes from feature 'x' and from feature 'x_1'"):
        FeatureEngine([Feature("x").multi_hash([2, 3]), Feature("x_1")])


TEXT, IDS, FLOAT = ragged_text(["a"]), torch.tensor([1]), torch.tensor([1.0])
WEIGHTED = Ragged.from_lists([[1]], [[1.0]])


@pytest.mark.parametrize(
    ("feature", "entry", "message"),
    [
        (Feature("x").log1p(), TEXT, "log1p: expected numbers, but received a Ragged of bytes"),
        (
            Feature("x").mod(3),
            FLOAT,
            "mod: expected ids of torch.int64, but received a Tensor of torch.float32",
        ),
        (Feature("x").multi_hash([3]), FLOAT, "multi_hash: expected ids"),
        (Feature("x").hash("farm"), FLOAT, "hash: expected strings or ids"),
        (Feature("x").hash_stack(2, 3), IDS.reshape(1, 1, 1), "hash_stack: expected ids of 1 or 2"),
        (Feature("x").vocabulary(["a"]), IDS, "vocabulary: expected strings, as its words are"),
        (Feature("x").vocabulary([1]), TEXT, "vocabulary: expected ids, as its own"),
        (
            Feature("x").fill_missing(0),
            Ragged.from_lists([[1, 2]]),
            "fill_missing: expected floats, or at most one integer per sample, or the integer that",
        ),
        (Feature("x").fill_missing(0.5), IDS, "fill_missing: expected integers to fill .* for missing ones"),
        (Feature("x").fill_missing(0.5, 1), IDS, "fill_missing: expected integers to fill"),
        (Feature("x").round(), IDS, "round: expected floats"),
        (Feature("x").truncate(3), IDS, "truncate: expected rows of several values"),
        (Feature("x").truncate(3, level="inner"), WEIGHTED, "truncate: expected lists of lists"),
        (Feature("x").to_dense(3), WEIGHTED, "to_dense: expected a Ragged without weights"),
        (Feature("x").to_dense(3), IDS, "to_dense: expected a Ragged, but"),
        (Feature("x").fill_empty(3), TEXT, "fill_empty: expected a Ragged of numbers"),
        (Feature("x").fill_empty(0.5), WEIGHTED, "fill_empty: expected an integer"),
        (Feature("x").flatten(), IDS, "flatten: expected lists of lists"),
        (Feature("x").fill_lists(2), IDS, "fill_lists: expected lists of lists"),
        (
            Feature("x").fill_lists(1),
            NestedRagged(torch.arange(2), torch.tensor([0, 1, 2]), torch.tensor([0, 2])),
            "fill_lists: expected rows of at most 1 lists, but received a row of 2",
        ),
        (Feature("x").lower(), IDS, "lower: expected strings"),
        (Feature("x").split(",").split(","), TEXT, "split: expected one string a row"),
        (Feature("x").select("x", "y").cross(), FLOAT, "cross: expected ids"),
        (
            Feature("x").select("x", "y").cross(),
            torch.tensor([1, 2]),
            r"cross: .*equally many rows.*\[2, 1\]",
        ),
        (Feature("x").select("x", "y").concat(), FLOAT, "concat: expected columns of one type"),
        (Feature("x").select("x", "y").concat(offsets=[1]), IDS, "concat: expected an offset for each of 2"),
    ],
)
def test_a_wrong_entry_is_refused_with_the_names_of_feature_and_step(feature, entry, message):
    with pytest.raises((TypeError, ValueError), match=f"Feature 'x', {message}"):
        FeatureEngine([feature])({"x": entry, "y": IDS})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f.mod(0), "modulus from 1 to"),
        (lambda f: f.bucketize([1, 1]), "increasing finite boundaries"),
        (lambda f: f.bucketize([]), "increasing finite boundaries"),
        (lambda f: f.hash("md5"), "'farm', 'murmur', .*, but received 'md5'"),
        (lambda f: f.hash("farm", -1), "bucket of 0 or more, but received -1"),
        (lambda f: f.multi_hash([1] * 5), "from 1 to 4 bucket counts"),
        (lambda f: f.vocabulary([]), "at least one word"),
        (lambda f: f.vocabulary(["a", "b", "a"]), "received b'a' twice"),
        (lambda f: f.vocabulary(["a"], oov=-1), "0 or more buckets"),
        (lambda f: f.vocabulary("words"), "a list of words"),
        (lambda f: f.vocabulary(["a", 1]), "all words to be strings, or all ids"),
        (lambda f: f.clip(2, 1), "low <= high"),
        (lambda f: f.clip(), "received neither"),
        (lambda f: f.normalise(mean=1), "mean and std, or neither"),
        (lambda f: f.normalise(0, 0), "positive std"),
        (lambda f: f.log(1), "base above 0"),
        (lambda f: f.truncate(0), "at least 1"),
        (lambda f: f.truncate(3, "up"), "'left', 'right' or 'top', but received 'up'"),
        (lambda f: f.truncate(3, level="x"), "'outer' or 'inner'"),
        (lambda f: f.to_dense(0), "at least 1"),
        (lambda f: f.to_dense(3, side="top"), "the side 'left' or 'right', but received 'top'"),
        (lambda f: f.to_ids(0), "from 1 to"),
        (lambda f: f.prefix(255, 8), "groups 0 to 254"),
        (lambda f: f.hash_stack(0, 8), "at least 1"),
        (lambda f: f.split(",,"), "one byte"),
        (lambda f: f.substring(0, -1), "at least 0"),
        (lambda f: f.cross(), "two columns or more, but there is only 'x'"),
        (lambda f: f.cross("a"), "two columns or more, but there is only 'a'"),
        (lambda f: f.mod(3).cross("a", "b"), "after its first step"),
        (lambda f: f.select(), "expected names"),
    ],
)
def test_impossible_settings_are_refused_where_they_are_written(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(Feature("x"))


@pytest.mark.parametrize(
    "feature", [Feature("x").fill_empty(7), Feature("x").to_dense(2), Feature("x").truncate(1)]
)
def test_steps_on_lists_say_how_a_column_of_single_values_becomes_lists(feature):
    column = OptionalRagged(torch.tensor([1, 3]), torch.tensor([0, 1, 1, 2]))
    for entry in (column, torch.tensor([1, 2, 3])):
        with pytest.raises(
            (TypeError, ValueError), match=r"one value per sample. fill_missing.*to_ragged\(\)"
        ):
            FeatureEngine([feature])({"x": entry})
    lists = Feature("x").to_ragged()
    made = FeatureEngine([replace(lists, ops=(*lists.ops, *feature.ops))])({"x": column})["x"]
    rows = made.tolist() if isinstance(made, torch.Tensor) else made.to_lists()
    assert rows in ([[1], [7], [3]], [[1, 0], [0, 0], [3, 0]], [[1], [], [3]])
