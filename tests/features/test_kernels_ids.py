"""Kernels of hashes and of ids: the native core's bits, on a GPU or in triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from karvan import ids
from karvan.kernels.ids import farm_rows, hash_stacks, murmur_rows, murmur_words, remainders
from karvan.ragged import Ragged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HASHES = {"farm": farm_rows, "murmur": murmur_rows}
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 193, 200)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
EDGES = [-1, -2, 0, 1, 7, -(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 32]
SIZES = [1, 2, 10, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 62) + 1, (1 << 63) - 1]


def strings_of(lengths, seed, before=0):
    """Random strings, which begin `before` bytes after an aligned address."""
    random = np.random.default_rng(seed)
    values = torch.from_numpy(random.integers(0, 256, before + sum(lengths), np.uint8))
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)], dtype=torch.int64)
    return Ragged(values.to(DEVICE)[before:], offsets.to(DEVICE))


def expected(kind, strings, size=None):
    return ids.hash_strings(strings.to("cpu"), kind, size)


@pytest.mark.parametrize("kind", HASHES)
@pytest.mark.parametrize("before", range(8))
def test_strings_of_every_length_that_matters_hash_alike_at_every_address(kind, before):
    strings = strings_of(LENGTHS, before, before)
    assert torch.equal(HASHES[kind](strings.values, strings.offsets).cpu(), expected(kind, strings))


@pytest.mark.parametrize("kind", HASHES)
@given(
    lengths=st.lists(st.sampled_from(LENGTHS) | st.integers(0, 300), max_size=40),
    seed=st.integers(0, 999),
    size=st.sampled_from([None, 0, *SIZES]),
)
def test_random_strings_hash_alike(kind, lengths, seed, size):
    strings = strings_of(lengths, seed, seed % 8)
    made = HASHES[kind](strings.values, strings.offsets, size=-1 if size is None else size)
    assert torch.equal(made.cpu(), expected(kind, strings, size))


@pytest.mark.parametrize("kind", HASHES)
def test_a_single_length_uses_no_longer_branch_of_the_kernel(kind):
    for length in LENGTHS:
        strings = strings_of([length] * 3, length)
        assert torch.equal(HASHES[kind](strings.values, strings.offsets).cpu(), expected(kind, strings))


@pytest.mark.parametrize("kind", HASHES)
def test_more_strings_than_a_program_has_lanes_hash_alike(kind):
    strings = strings_of(np.random.default_rng(0).integers(0, 40, 300).tolist(), 1)
    assert torch.equal(HASHES[kind](strings.values, strings.offsets).cpu(), expected(kind, strings))


@pytest.mark.parametrize("kind", HASHES)
def test_strings_of_one_width_need_no_offsets(kind):
    for width in (1, 8, 24):
        strings = strings_of([width] * 5, width)
        made = HASHES[kind](strings.values, None, width)
        assert torch.equal(made.cpu(), expected(kind, strings))
    empty = torch.zeros(0, dtype=torch.uint8, device=DEVICE)
    assert HASHES[kind](empty, None).shape == (0,)
    assert HASHES[kind](empty, torch.zeros(1, dtype=torch.int64, device=DEVICE)).shape == (0,)


@pytest.mark.parametrize("kind", HASHES)
def test_offsets_may_leave_bytes_at_both_ends_and_wrong_ones_read_nothing_outside(kind):
    strings = strings_of([5, 10, 70, 9], 3)
    some = strings.offsets[1:4]
    assert torch.equal(HASHES[kind](strings.values, some).cpu(), expected(kind, Ragged(strings.values, some)))
    wrong = torch.tensor([-(1 << 40), 3, 1 << 40, 2], device=DEVICE)
    right = torch.tensor([0, 3, 94], device=DEVICE)
    made = HASHES[kind](strings.values, wrong).cpu()
    assert torch.equal(made[:2], expected(kind, Ragged(strings.values, right)))
    assert made[2] == ids.hash_strings([b""], kind)[0]


@given(
    st.lists(st.lists(INT64 | st.sampled_from(EDGES), min_size=3, max_size=3), max_size=9), st.integers(1, 3)
)
def test_rows_of_ids_hash_as_their_bytes(rows, width):
    words = torch.tensor(rows, dtype=torch.int64, device=DEVICE).reshape(-1, 3)[:, :width]
    data = [row.numpy().tobytes() for row in words.cpu()]
    assert torch.equal(murmur_words(words).cpu(), ids.murmur(data))


@given(st.lists(INT64 | st.sampled_from(EDGES), max_size=30), st.sampled_from(SIZES))
def test_remainders_are_those_of_unsigned_numbers(values, modulus):
    tensor = torch.tensor(values, dtype=torch.int64, device=DEVICE)
    correct = torch.tensor([x % (1 << 64) % modulus for x in values], dtype=torch.int64)
    assert torch.equal(remainders(tensor, modulus).cpu(), correct)
    one = torch.tensor([modulus], device=DEVICE)
    assert torch.equal(remainders(tensor, one).cpu(), correct)
    assert torch.equal(remainders(tensor, one.expand(len(values))).cpu(), correct)


def test_each_id_may_have_its_own_modulus_and_any_shape():
    values = torch.tensor(EDGES, device=DEVICE).expand(len(SIZES), -1)
    moduli = torch.tensor(SIZES, device=DEVICE).unsqueeze(1)
    correct = [[x % (1 << 64) % size for x in EDGES] for size in SIZES]
    assert remainders(values, moduli).tolist() == correct
    assert remainders(values.T, moduli.T).T.tolist() == correct
    assert remainders(values[:, ::2], 10).tolist() == [[x % (1 << 64) % 10 for x in EDGES[::2]]] * len(SIZES)
    assert remainders(torch.arange(3000, device=DEVICE) - 1, 7)[-1] == 2998 % 7


@given(st.lists(INT64 | st.sampled_from(EDGES), max_size=9), st.integers(1, 4), st.sampled_from(SIZES[:-2]))
def test_hash_stacks_are_those_of_the_native_core(values, rounds, size):
    tensor = torch.tensor(values, dtype=torch.int64, device=DEVICE)
    assert torch.equal(hash_stacks(tensor, rounds, size).cpu(), ids.hash_stack(tensor.cpu(), rounds, size))
