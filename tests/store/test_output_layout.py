"""Lengths and masks of outputs from elsewhere, against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan.store.program import OutputLayout


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 3))
def test_lengths_and_mask_say_where_ids_are(lengths, room):
    longest = max(lengths, default=0) + room
    offsets = torch.tensor([sum(lengths[:row]) for row in range(len(lengths) + 1)])
    layout = OutputLayout(len(lengths), sum(lengths), longest, offsets)
    assert layout.lengths().tolist() == lengths
    assert layout.mask().shape == (len(lengths), longest)
    assert layout.mask().tolist() == [[cell < length for cell in range(longest)] for length in lengths]


@given(st.integers(0, 6), st.integers(1, 4))
def test_without_offsets_each_row_has_one_id(rows, length):
    layout = OutputLayout(rows, rows, length, None)
    assert layout.lengths().tolist() == [1] * rows
    assert layout.mask().tolist() == [[True] + [False] * (length - 1)] * rows
