"""Ragged and Batch: round trips, and errors that say what was expected and received."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan.ragged import Batch, NestedRagged, Padded, Ragged

nested = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=6)


@given(nested)
def test_lists_survive_the_round_trip(lists):
    ragged = Ragged.from_lists(lists)
    assert ragged.to_lists() == lists
    assert ragged.rows == len(lists)
    assert ragged.lengths().tolist() == [len(row) for row in lists]
    assert ragged.offsets.dtype == torch.int64


@given(nested, st.data())
def test_equal_compares_rows_and_weights(lists, data):
    weights = [[data.draw(st.floats(0, 1, width=32)) for _ in row] for row in lists]
    ragged = Ragged.from_lists(lists, weights=weights)
    assert ragged.equal(Ragged.from_lists(lists, weights=weights))
    assert not ragged.equal(Ragged.from_lists(lists))
    assert not ragged.equal(Ragged.from_lists([*lists, []], weights=[*weights, []]))
    assert ragged.weights.dtype == torch.float32


def test_no_offsets_means_one_value_per_row():
    ragged = Ragged(torch.tensor([5, 6, 7]))
    assert ragged.offsets is None
    assert ragged.rows == 3
    assert ragged.lengths().tolist() == [1, 1, 1]
    assert ragged.to_lists() == [[5], [6], [7]]
    assert ragged.equal(Ragged(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2, 3])))
    assert ragged.validate() is ragged


def test_values_may_be_vectors():
    ragged = Ragged(torch.ones(3, 2), torch.tensor([0, 1, 3]))
    assert ragged.rows == 2
    assert ragged.to_lists() == [[[1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]


def test_no_rows_at_all():
    assert Ragged.from_lists([]).to_lists() == []
    assert Ragged(torch.empty(0, dtype=torch.int64)).rows == 0


def test_from_lists_takes_a_dtype():
    assert Ragged.from_lists([[1], [2, 3]], dtype=torch.float32).values.dtype == torch.float32


def test_to_keeps_all_parts():
    ragged = Ragged.from_lists([[1, 2], []], weights=[[0.5, 1.0], []])
    assert ragged.to("cpu").equal(ragged)
    moved = ragged.to("meta")
    assert {moved.values.device.type, moved.offsets.device.type, moved.weights.device.type} == {"meta"}
    assert Ragged(torch.tensor([1])).to("cpu").offsets is None


def test_repr_says_rows_dtype_and_weights():
    assert repr(Ragged.from_lists([[1, 2], []])) == "Ragged(rows=2, values=torch.int64[2])"
    assert "weighted" in repr(Ragged.from_lists([[1]], weights=[[1.0]]))


ids = torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Ragged([1, 2, 3]), TypeError, "values must be a Tensor, but are list"),
        (lambda: Ragged(ids, [0, 3]), TypeError, "offsets must be a Tensor, but are list"),
        (lambda: Ragged(ids, None, [1.0]), TypeError, "weights must be a Tensor"),
        (lambda: Ragged(torch.tensor(1)), ValueError, r"1-D or 2-D, but have shape \(\)"),
        (
            lambda: Ragged(ids, torch.tensor([0, 3], dtype=torch.int32)),
            TypeError,
            "int64, but are torch.int32",
        ),
        (lambda: Ragged(ids, torch.tensor([[0, 3]])), ValueError, r"1-D .* shape \(1, 2\)"),
        (lambda: Ragged(ids, torch.empty(0, dtype=torch.int64)), ValueError, r"rows \+ 1 entries"),
        (lambda: Ragged(ids, torch.tensor([0, 3], device="meta")), ValueError, "on cpu .* on meta"),
        (lambda: Ragged(ids, weights=ids), TypeError, "floating point, but are torch.int64"),
        (lambda: Ragged(ids, weights=torch.ones(2)), ValueError, r"shape \(3,\).* but have \(2,\)"),
        (lambda: Ragged(ids, weights=torch.ones(3, device="meta")), ValueError, "weights must be on cpu"),
        (
            lambda: Ragged.from_lists([[1], [2]], [[1.0], []]),
            ValueError,
            "1 entries in row 1, but there are 0",
        ),
        (lambda: Ragged.from_lists([[1], [2]], [[1.0]]), ValueError, "2 rows, but there are 1"),
    ],
)
def test_construction_errors_say_expected_and_received(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], "start at 0, but start at 1"),
        ([0, 2], "end at 3, the number of values, but end at 2"),
        ([0, 4, 3], "from 4 to 3 at row 1"),
        ([0, -1, 3], "from 0 to -1 at row 0"),
    ],
)
def test_validate_reads_the_offsets_and_the_constructor_does_not(offsets, message):
    ragged = Ragged(ids, torch.tensor(offsets))
    with pytest.raises(ValueError, match=message):
        ragged.validate()


def test_validate_sees_parts_replaced_after_construction():
    ragged = Ragged.from_lists([[1], [2]])
    ragged.offsets = ragged.offsets.int()
    with pytest.raises(TypeError, match="int32"):
        ragged.validate()


def test_batch_is_a_mapping_in_the_given_order():
    user, history = torch.tensor([1, 2]), Ragged.from_lists([[1], [2, 3]])
    batch = Batch({"user": user, "history": history})
    assert batch.samples == 2
    assert list(batch) == ["user", "history"]
    assert len(batch) == 2
    assert batch["history"] is history
    assert dict(batch) == {"user": user, "history": history}
    assert repr(batch) == "Batch(samples=2, user, history)"
    assert not hasattr(batch, "size")
    assert copy.deepcopy(batch).samples == pickle.loads(pickle.dumps(batch)).samples == 2


def test_batch_moves_every_entry():
    batch = Batch({"user": torch.tensor([1]), "history": Ragged.from_lists([[1, 2]])}).to("meta")
    assert batch["user"].device.type == batch["history"].values.device.type == "meta"


def test_batch_of_unequal_rows_names_both_features():
    with pytest.raises(ValueError, match="'user' has 2 and feature 'history' has 3"):
        Batch(
            {
                "user": torch.tensor([1, 2]),
                "price": torch.ones(2),
                "history": Ragged.from_lists([[], [1], []]),
            }
        )


def test_batch_refuses_what_has_no_rows():
    with pytest.raises(TypeError, match="'user' must be a Ragged or a Tensor, but is list"):
        Batch({"user": [1, 2]})
    with pytest.raises(ValueError, match=r"'user' .* 0-D"):
        Batch({"user": torch.tensor(1)})
    assert Batch({}).samples == 0


def test_padded_unpacks_into_values_and_mask():
    values, mask = Padded(torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool))
    assert values.shape == (1, 2, 3)
    assert mask.all()


def rows_of_lists():
    return NestedRagged(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1, 1, 3]))


def test_nested_rows_hold_lists():
    assert rows_of_lists().rows == 3
    assert rows_of_lists().to_lists() == [[[1, 2]], [], [[], [3, 4]]]
    assert rows_of_lists().lists().to_lists() == [[1, 2], [], [3, 4]]
    assert rows_of_lists().to("cpu").to_lists() == rows_of_lists().to_lists()
    assert "rows=3, lists=3" in repr(rows_of_lists())


def test_a_batch_holds_nested_rows():
    batch = Batch({"a": torch.arange(3), "b": rows_of_lists()})
    assert batch.samples == 3
    assert batch.to("cpu")["b"].to_lists() == rows_of_lists().to_lists()
    with pytest.raises(ValueError, match="feature 'a' has 2 and feature 'b' has 3"):
        Batch({"a": torch.arange(2), "b": rows_of_lists()})


@pytest.mark.parametrize("offsets", [torch.tensor([0.0, 1.0]), torch.zeros(0, dtype=torch.int64)])
def test_nested_offsets_must_be_int64_and_not_empty(offsets):
    good = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="inner offsets must be 1-D int64"):
        NestedRagged(torch.arange(1), offsets, good)
    with pytest.raises(ValueError, match="outer offsets must be 1-D int64"):
        NestedRagged(torch.arange(1), good, offsets)


def test_rows_of_lists_say_how_many_they_have():
    nested = NestedRagged(torch.arange(3), torch.tensor([0, 1, 3]), torch.tensor([0, 0, 2]))
    assert nested.lengths().tolist() == [0, 2]


@pytest.mark.parametrize("rows", [Ragged.from_lists([[1], [2]]), rows_of_lists()])
@pytest.mark.parametrize("use", [lambda x: x == "Male", lambda x: x != 1, lambda x: torch.ones(2) == x])
def test_rows_of_lists_and_text_are_not_equal_to_a_value_without_a_word(rows, use):
    with pytest.raises(TypeError, match=r"is not a tensor.*vocabulary"):
        use(rows)
    assert rows in {rows}
