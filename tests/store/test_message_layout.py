"""Messages between those who ask and owners: what is put into one array comes out by rank and table."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan.store import messages as layout


@st.composite
def asked(draw):
    """Dimensions by slot, and for each rank its keys by slot."""
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    keys = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6)
    return dims, [[draw(keys) for _ in dims] for _ in range(draw(st.integers(1, 4)))]


def as_message(of_rank):
    """Keys of all tables, then their numbers of uses, two to a number of 64 bits."""
    keys = [key for of_slot in of_rank for key in of_slot]
    message = np.zeros(layout.words(len(keys)), np.int64)
    message[: len(keys)] = keys
    message[len(keys) :].view(np.uint32)[: len(keys)] = np.arange(len(keys)) + 1
    return message


@given(asked())
def test_keys_come_out_by_rank_and_slot_and_uses_have_room(given_):
    _, keys = given_
    counts = [[len(of_slot) for of_slot in of_rank] for of_rank in keys]
    messages = [as_message(of_rank) for of_rank in keys]
    found = layout.keys_of(messages, counts)
    assert [[each.tolist() for each in of_rank] for of_rank in found] == keys
    for message, of_rank in zip(messages, counts, strict=True):
        uses = message[sum(of_rank) :].view(np.uint32)
        assert uses[: sum(of_rank)].tolist() == list(range(1, sum(of_rank) + 1))
        assert len(uses) - sum(of_rank) in (0, 1)  # no more room than it takes


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=5))
def test_an_array_is_cut_into_the_pieces_that_were_joined(pieces):
    whole = torch.tensor([each for piece in pieces for each in piece], dtype=torch.int64)
    found = layout.cut(whole, [len(piece) for piece in pieces])
    assert [each.tolist() for each in found] == pieces


@given(asked())
def test_vectors_of_all_ranks_follow_each_other_without_gaps(given_):
    dims, keys = given_
    counts = [[len(of_slot) for of_slot in of_rank] for of_rank in keys]
    sizes = layout.floats(counts, dims)
    begins = [0, *itertools.accumulate(sizes)]
    by_rank = [layout.starts_of(counts[rank], dims, begins[rank]) for rank in range(len(keys))]
    # One after the other: a vector begins where the one before it ends.
    at = 0
    for of_rank in by_rank:
        for of_slot, dim in zip(of_rank, dims, strict=True):
            for begin in of_slot.tolist():
                assert begin == at
                at += dim
    assert at == sum(sizes) == begins[-1]
    joined = layout.by_slot(by_rank)
    assert [each.tolist() for each in joined] == [
        [begin for of_rank in by_rank for begin in of_rank[slot].tolist()] for slot in range(len(dims))
    ]
