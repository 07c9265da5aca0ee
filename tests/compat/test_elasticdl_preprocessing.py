"""Preprocessing layers of ElasticDL, by the numbers of its public tests and against slow references."""

import math

import numpy as np
import pytest
import torch
from elasticdl_zoo import LOCAL, elasticdl, own_modules, zoo_of
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.compat.elasticdl.contract import ContractError
from karvan.compat.elasticdl_preprocessing.feature_column import feature_column
from karvan.compat.elasticdl_preprocessing.layers import (
    ConcatenateWithOffset,
    Discretization,
    Hashing,
    IndexLookup,
    LogRound,
    Normalizer,
    RoundIdentity,
    SparseEmbedding,
    ToNumber,
    ToRagged,
    ToSparse,
)
from karvan.compat.elasticdl_preprocessing.utils import analyzer_utils
from karvan.compat.unsupported import UnsupportedError


def words(entry):
    """Rows of strings as lists of them."""
    return [[bytes(word).decode() for word in row] for row in entry.to_lists()]


def ragged_floats(*rows):
    return kv.Ragged.from_lists(rows, dtype=torch.float32)


def test_strings_and_the_text_of_integers_are_hashed():
    layer = Hashing(num_bins=3)
    assert layer(np.asarray([["A"], ["B"], ["C"], ["D"], ["E"]])).tolist() == [[1], [0], [1], [1], [2]]
    assert layer([["A", "B"], ["C", "D"], ["E"], []]).to_lists() == [[1, 0], [1, 1], [2], []]
    numbers = Hashing(num_bins=1000)
    for dtype in (torch.int64, torch.int32):
        assert numbers(torch.tensor([[12], [345]], dtype=dtype)).tolist() == [[888], [678]]
    assert numbers(["12", b"345"]).tolist() == [888, 678]
    assert numbers(kv.Ragged.from_lists([[12, 345], []])).to_lists() == [[888, 678], []]
    with pytest.raises(ValueError, match="num_bins of at least 1, got 0"):
        Hashing(0)
    with pytest.raises(TypeError, match="expected integers"):
        layer(torch.tensor([0.5]))


@pytest.mark.parametrize("kind", ["list", "file"])
def test_words_are_looked_up(tmp_path, kind):
    file = tmp_path / "words.txt"
    file.write_text("A\nB\nC\n")
    layer = IndexLookup(["A", "B", "C"] if kind == "list" else str(file))
    assert layer(np.array([["A"], ["B"], ["C"], ["D"], ["E"]])).tolist() == [[0], [1], [2], [3], [3]]
    assert layer([["A", "B", "C"], ["D", "E"]]).to_lists() == [[0, 1, 2], [3, 3]]
    assert layer.vocab_size() == 4


def test_unknown_words_are_hashed_or_have_no_index():
    assert IndexLookup(["A"], num_oov_tokens=0)([["A", "Z"]]).tolist() == [[0, -1]]
    many = IndexLookup(["A", "B"], num_oov_tokens=5)
    unknown = ["x", "y", "z", "12"]
    assert many(unknown).tolist() == (Hashing(5)(unknown) + 2).tolist()
    integers = IndexLookup([7, 8], num_oov_tokens=5)
    assert integers(torch.tensor([8, 7, 12])).tolist() == [1, 0, 2 + int(Hashing(5)([12])[0])]
    with pytest.raises(ValueError, match="each word once"):
        IndexLookup(["A", "A"])
    with pytest.raises(ValueError, match="expects a vocabulary"):
        IndexLookup()


def test_numbers_are_discretized():
    layer = Discretization(bins=[1, 5, 10])
    assert layer(torch.tensor([[0.2], [1.6], [4.2], [6.1], [10.9]])).tolist() == [[0], [1], [1], [2], [3]]
    assert layer(ragged_floats([0.2, 1.6, 4.2], [6.1], [10.9])).to_lists() == [[0, 1, 1], [2], [3]]
    assert Discretization([0.0, 1.0, 2.0])(torch.tensor([-1.0, 0.0, 1.0, 1.5, 2.0])).tolist() == [
        0,
        1,
        2,
        2,
        3,
    ]
    assert layer.num_bins() == 4
    with pytest.raises(ValueError, match="Discretization expects a number everywhere, got NaN"):
        layer(torch.tensor([[math.nan]]))


def test_logarithms_are_rounded():
    layer = LogRound(num_bins=20, base=2)
    assert layer(torch.tensor([[0.0], [2.6], [0.2], [3.1], [1024]])).tolist() == [[0], [1], [0], [2], [10]]
    assert layer(ragged_floats([1.1, 3.4], [1025])).to_lists() == [[0, 2], [10]]
    assert LogRound(16, base=2)(np.array([[1.2], [1.6], [0.2], [3.1], [100]])).tolist() == [
        [0],
        [1],
        [0],
        [2],
        [7],
    ]


@given(
    numbers=st.lists(st.floats(-5, 1e9, width=32), min_size=1, max_size=20),
    bins=st.integers(1, 30),
    default=st.integers(0, 40),
    base=st.sampled_from([None, 2, 10, 1.5]),
)
def test_logarithms_are_rounded_as_python_rounds_them(numbers, bins, default, base):
    made = LogRound(bins, default, base)(torch.tensor(numbers, dtype=torch.float32)).tolist()
    for number, found in zip(numbers, made, strict=True):
        exact = math.log(number) / math.log(base or math.e) if number > 0 else -math.inf
        if abs(exact % 1 - 0.5) > 1e-9:  # where the last bit decides, libraries differ
            expected = round(exact) if math.isfinite(exact) else -1
            assert found == (expected if 0 <= expected < bins else default)


def test_numbers_are_rounded_to_ids():
    layer = RoundIdentity(num_buckets=10)
    assert layer(torch.tensor([[1.2], [1.6], [0.2], [3.1], [4.9]])).tolist() == [[1], [2], [0], [3], [5]]
    assert layer(ragged_floats([1.1, 3.4], [0.5])).to_lists() == [[1, 3], [0]]
    assert RoundIdentity(5, default_value=4)(torch.tensor([-1.0, 4.4, 5.0])).tolist() == [4, 4, 4]


def test_numbers_are_normalized():
    layer = Normalizer(subtractor=1.0, divisor=2.0)
    assert layer(np.asarray([[3.0], [5.0], [7.0]])).tolist() == [[1.0], [2.0], [3.0]]
    assert layer(torch.tensor([3, 5])).dtype == torch.float32
    assert layer(ragged_floats([3, 5], [], [8])).to_lists() == [[1.0, 2.0], [], [3.5]]
    with pytest.raises(ValueError, match="other than 0"):
        Normalizer(1.0, 0)


def test_strings_become_numbers():
    layer = ToNumber(out_type=torch.int32, default_value=-1)
    made = layer([["123", ""], ["456", "-789"]])
    assert (made.dtype, made.tolist()) == (torch.int32, [[123, -1], [456, -789]])
    made = ToNumber(np.float32, 0.0)([["123.1", ""], ["456", "-789.987"]])
    assert torch.equal(made, torch.tensor([[123.1, 0.0], [456.0, -789.987]]))
    assert layer([["123", ""], ["456"], []]).to_lists() == [[123, -1], [456], []]
    assert layer(torch.tensor([[1.0], [2.0]])).tolist() == [[1], [2]]
    assert layer(ragged_floats([1, 2], [3])).to_lists() == [[1, 2], [3]]
    with pytest.raises(ValueError, match="fit into torch"):
        ToNumber(torch.int8, 0)(["300"])
    with pytest.raises(ValueError, match="a dtype of numbers"):
        ToNumber(str, 0)
    with pytest.raises(UnsupportedError, match="float64"):
        ToNumber(torch.float64, 0)(["3"])


def test_dense_tensors_become_rows():
    layer = ToRagged()
    assert layer(torch.tensor([[1], [-1], [4]])).to_lists() == [[1], [], [4]]
    assert ToRagged(ignore_value=0)(torch.tensor([[1, 0], [0, 0], [4, 5]])).to_lists() == [[1], [], [4, 5]]
    assert words(layer([["1,2,3"], ["4,5"], [""]])) == [["1", "2", "3"], ["4", "5"], []]
    assert words(layer(["1,,3", "4,5", ""])) == [["1", "3"], ["4", "5"], []]
    assert words(ToRagged("|")(np.array(["a|b", "c"]))) == [["a", "b"], ["c"]]
    with pytest.raises(ValueError, match="need ignore_value"):
        layer(torch.tensor([[1.0]]))
    with pytest.raises(UnsupportedError, match="more than two dimensions"):
        layer(torch.zeros(1, 1, 1))


def test_dense_tensors_become_sparse():
    layer = ToSparse()
    assert words(layer([["A", ""], ["B", "C"]])) == [["A"], ["B", "C"]]
    rows = layer(torch.tensor([[12, -1], [45, 78]]))
    assert rows.to_lists() == [[12], [45, 78]]
    assert layer(rows) is rows
    assert words(ToSparse("B")(np.array([["A", ""], ["B", "C"]]))) == [["A", ""], ["C"]]


def test_ids_are_joined_with_offsets():
    layer = ConcatenateWithOffset(offsets=[0, 10], axis=1)
    made = layer([torch.tensor([[1], [1], [1]]), torch.tensor([[2], [2], [2]])])
    assert made.tolist() == [[1, 12], [1, 12], [1, 12]]
    first, second = kv.Ragged.from_lists([[1], [], [1]]), kv.Ragged.from_lists([[2], [2], []])
    assert layer([first, second]).to_lists() == [[1, 12], [12], [1]]
    with pytest.raises(ValueError, match="each of 2 offsets, got 1"):
        layer([first])
    with pytest.raises(UnsupportedError, match="axis=0"):
        ConcatenateWithOffset([0, 1], axis=0)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_vectors_of_rows_are_combined(combiner):
    layer = SparseEmbedding(10, 3, combiner=combiner, name="item")
    single = layer(kv.Ragged.from_lists([[number] for number in range(10)])).detach()
    assert 0.01 < float(single.abs().max()) <= 0.05  # as Keras's uniform
    rows = [[1, 2, 3], [], [4, 4]]
    made = layer(kv.Ragged.from_lists(rows))
    for row, vector in zip(rows, made, strict=True):
        divisor = {"sum": 1, "mean": len(row), "sqrtn": math.sqrt(len(row))}[combiner] or 1
        expected = sum((single[number] for number in row), torch.zeros(3)) / divisor
        assert vector.tolist() == pytest.approx(expected.tolist(), abs=1e-7)
    dense = layer(torch.tensor([[1, 2, 3], [0, 0, 0], [4, 4, 0]]))
    assert torch.equal(dense, made)
    with pytest.raises(ContractError, match="ids from 0 to 9, as input_dim says, got 10"):
        layer(torch.tensor([[10]]))
    with pytest.raises(ValueError, match="sum, mean or sqrtn, got 'max'"):
        SparseEmbedding(10, 3, combiner="max")


def test_initialisers_have_the_names_of_keras():
    zeros = SparseEmbedding(0, 2, embeddings_initializer="zeros")
    assert zeros(torch.tensor([[5]])).tolist() == [[0, 0]]
    with pytest.raises(ContractError, match="no initialiser 'glorot'"):
        SparseEmbedding(0, 2, embeddings_initializer="glorot")


def test_statistics_come_from_the_environment(monkeypatch):
    defaults = {"min": 10, "max": 100, "avg": 10, "stddev": 10, "distinct_count": 19}
    for name, value in defaults.items():
        assert getattr(analyzer_utils, f"get_{name}")("age", value) == value
    assert analyzer_utils.get_bucket_boundaries("age", [10, 78]) == [10, 78]
    assert analyzer_utils.get_vocabulary("city", ["a", "b"]) == ["a", "b"]
    given = {"min": "11", "max": "100", "avg": "50.9", "stddev": "90.87", "distinct_count": "50"}
    for name, value in given.items():
        monkeypatch.setenv(f"_age_{name}", value)
        assert getattr(analyzer_utils, f"get_{name}")("age", 1) == float(value)
    monkeypatch.setenv("_age_boundaries", "67,15,89,15")
    assert analyzer_utils.get_bucket_boundaries("age", []) == [15, 67, 89]
    monkeypatch.setenv("_city_vocab", "cities.txt")
    assert analyzer_utils.get_vocabulary("city", []) == "cities.txt"
    monkeypatch.setenv("_age_min", "young")
    with pytest.raises(ValueError, match="_age_min has a wrong value"):
        analyzer_utils.get_min("age", 0)


def test_columns_of_tensorflow_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"use layers\.ConcatenateWithOffset"):
        feature_column.concatenated_categorical_column([])


MODEL = """
import numpy as np
from elasticdl_preprocessing.layers import ConcatenateWithOffset, IndexLookup, SparseEmbedding, ToRagged
from elasticdl_preprocessing.layers.discretization import Discretization
from elasticdl_preprocessing.layers.hashing import Hashing
from elasticdl_preprocessing.layers.normalizer import Normalizer

age, city = Discretization([20, 40]), IndexLookup(["Rome", "Oslo"], 0)
tags, rows = Hashing(50), ToRagged("|")
join = ConcatenateWithOffset([0, 3, 5])

class custom_model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = SparseEmbedding(55, 8, combiner="sum")
        self.wide = SparseEmbedding(55, 1, combiner="sum")
        self.out = torch.nn.Linear(9, 1)

    def forward(self, features):
        deep, wide = self.deep(features["ids"]), self.wide(features["ids"])
        return self.out(torch.cat([deep, features["age"].reshape(-1, 1)], 1)) + wide

def optimizer(model, lr=0.05):
    return torch.optim.Adam(model.parameters(), lr)

def feed(records, mode, metadata):
    ages, cities, words, labels = zip(*records)
    ages = np.array(ages, np.float32)[:, None]
    ids = join([age(ages), city(np.array(cities)[:, None]), tags(rows(np.array(words)))])
    features = {"ids": ids, "age": Normalizer(30.0, 10.0)(ages)}
    return features if mode == Mode.PREDICTION else (features, np.array(labels, np.float32))
"""


def test_a_model_of_preprocessing_layers_learns(tmp_path, capfd):
    rng = np.random.default_rng(0)
    lines = ["age,city,tags,label"]
    for _ in range(200):
        age, city, tag = (
            int(rng.integers(10, 60)),
            rng.choice(["Rome", "Oslo"]),
            rng.choice(["x", "y|x", "z"]),
        )
        lines.append(f"{age},{city},{tag},{2.0 * (age > 40) + (city == 'Rome') - ('y' in tag)}")
    (tmp_path / "data.csv").write_text("\n".join(lines) + "\n")
    with own_modules("zoo_model"):
        zoo, out = zoo_of(tmp_path, MODEL), tmp_path / "model"
        data = ("--training_data", tmp_path / "data.csv", "--minibatch_size", 20, "--num_epochs", 15)
        assert elasticdl("train", *zoo, *LOCAL, *data, "--output", out) == 0
        tables = {table.name: table.rows for table in kv.checkpoint.summary(out).tables}
        assert tables == {"sparse_embedding": 8, "sparse_embedding_1": 8}  # 3 ages, 2 cities, 3 tags
        capfd.readouterr()
        load = ("--validation_data", tmp_path / "data.csv", "--checkpoint_dir_for_init", out)
        assert elasticdl("evaluate", *zoo, *LOCAL, *load) == 0
        assert float(capfd.readouterr().out.split("loss: ")[1]) < 0.1
