"""Kernels of rows, and the steps that use them, beside the same on the CPU; on a GPU or in an interpreter."""

import numpy as np
import pytest
import torch
from feature_helpers import nested, run, same
from hypothesis import given
from hypothesis import strategies as st

from karvan.features import Feature
from karvan.features.ops.cross import cross_lists
from karvan.features.ops.strings import Truncate, truncate
from karvan.kernels.ids import combinations
from karvan.kernels.rows import check_offsets, dense_rows, slices
from karvan.ragged import Ragged, as_offsets

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64]
TYPES += [torch.float16, torch.bfloat16]
LENGTHS = st.lists(st.integers(0, 5) | st.sampled_from([63, 64, 65, 130]), max_size=20)


def ragged(lengths, seed, dtype=torch.int64, width=None, few=False, weighted=False):
    random = np.random.default_rng(seed)
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)], dtype=torch.int64)
    shape = (sum(lengths),) if width is None else (sum(lengths), width)
    values = torch.from_numpy(random.integers(0, 4 if few else 250, shape)).to(dtype)
    weights = torch.from_numpy(random.random(sum(lengths), np.float32)) if weighted else None
    return Ragged(values, offsets, weights)


@given(LENGTHS, st.integers(0, 99), st.integers(0, 99), st.sampled_from(TYPES), st.sampled_from([None, 1, 3]))
def test_slices_are_those_of_python(lengths, seed, cut, dtype, width):
    entry = ragged(lengths, seed, dtype, width)
    random = np.random.default_rng(cut)
    first = [int(random.integers(0, n + 1)) for n in lengths]
    counts = [int(random.integers(0, n + 1 - a)) for n, a in zip(lengths, first, strict=True)]
    starts = entry.offsets[:-1] + torch.tensor(first, dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum(counts, dtype=np.int64)], dtype=torch.int64)
    parts = [entry.values[a : a + n] for a, n in zip(starts.tolist(), counts, strict=True)]
    correct = torch.cat([entry.values[:0], *parts])
    made = slices(entry.values.to(DEVICE), starts.to(DEVICE), offsets.to(DEVICE), sum(counts))
    assert same(made.cpu(), correct)


@pytest.mark.parametrize("side", ["left", "right"])
@given(LENGTHS, st.integers(0, 99), st.integers(1, 70), st.sampled_from(TYPES), st.sampled_from([None, 2]))
def test_rows_become_a_matrix(side, lengths, seed, length, dtype, width):
    entry = ragged(lengths, seed, dtype, width)
    correct = run(Feature("x").to_dense(length, 1, side), entry)
    made = dense_rows(entry.values.to(DEVICE), entry.offsets.to(DEVICE), length, 1, side == "left")
    assert same(made.cpu().to(correct.dtype), correct)  # the feature widens small integers before


@given(
    st.lists(st.tuples(LENGTHS, st.integers(1, 7), st.booleans()), min_size=1, max_size=3),
    st.sampled_from(["left", "right"]),
)
def test_rows_are_cut_as_on_the_cpu(columns, side):
    entries = [ragged(lengths, i, weighted=weighted) for i, (lengths, _, weighted) in enumerate(columns)]
    ops = [Truncate(length, side, "outer") for _, length, _ in columns]
    made = truncate(ops, [entry.to(DEVICE) for entry in entries], [op.length for op in ops], by_kernels=True)
    for op, entry, result in zip(ops, entries, made, strict=True):
        assert same(result.to("cpu"), run(Feature("x").then(op), entry))


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), max_size=6),
    st.integers(1, 4),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["outer", "inner"]),
)
def test_lists_of_lists_are_cut_as_on_the_cpu(lists, length, side, level):
    op, entry = Truncate(length, side, level), nested(lists)
    (made,) = truncate([op], [entry.to(DEVICE)], [length], by_kernels=True)
    assert same(made.to("cpu"), run(Feature("x").then(op), entry))


@given(
    st.lists(st.tuples(*[st.integers(0, 5) | st.sampled_from([0, 40])] * 3), max_size=6),
    st.integers(2, 3),
    st.booleans(),
    st.booleans(),
)
def test_crosses_are_those_of_the_cpu(rows, width, weighted, plain):
    columns = [ragged([row[i] for row in rows], i, few=True, weighted=weighted) for i in range(width)]
    if plain:
        columns[1] = Ragged(torch.arange(len(rows)) - 2)
    names = [f"c{i}" for i in range(width)]
    correct = run(Feature("x").cross(*names), columns[0], **dict(zip(names, columns, strict=True)))
    moved = [column.to(DEVICE) for column in columns]
    for made in cross_lists([moved, moved[:width]], combinations):
        assert same(Ragged(*made).to("cpu"), correct)


def test_right_offsets_pass():
    entry = ragged([3, 0, 2000, 1], 0).to(DEVICE)
    check_offsets(as_offsets(entry), entry.values.shape[0], whole=True)
    check_offsets(entry.offsets[1:3], entry.values.shape[0], whole=False)
    check_offsets(torch.zeros(1, dtype=torch.int64, device=DEVICE), 0, whole=True)


WRONG = [
    ([0, 2, 1, 3], True, "must not decrease"),
    ([1, 2, 3], True, "must start at 0"),
    ([0, 2], True, "must end at the number of values"),
    ([0, 2, 4], True, "must end at the number of values"),
    ([-1, 2], False, "must be within the values"),
    ([0, 4], False, "must be within the values"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="stops the GPU: tests/gpu does it in another process")
@pytest.mark.parametrize(("offsets", "whole", "message"), WRONG)
def test_wrong_offsets_are_an_error(offsets, whole, message):
    with pytest.raises(Exception, match=message):
        check_offsets(torch.tensor(offsets), 3, whole=whole)
