"""Ids: the hashes and the id arithmetic of other systems, each against a slow reference in plain Python."""

import struct
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from slow_hashes import MASK, signed, slow_farm, slow_murmur

from karvan import _native, ids
from karvan.store.messages import hashes_of

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.binary(max_size=300))
def test_farm_equals_the_slow_reference(data):
    assert ids.farm(data) == signed(slow_farm(data))


@given(st.binary(max_size=300), st.integers(0, MASK))
def test_murmur_equals_the_slow_reference(data, seed):
    assert ids.murmur(data) == signed(slow_murmur(data))
    assert _native.murmur64a(data, seed) == signed(slow_murmur(data, seed))


def test_every_length_equals_the_slow_references():
    bytes_ = np.random.default_rng(0).bytes(200)
    rows = [bytes_[:size] for size in range(201)]
    assert ids.farm(rows).tolist() == [signed(slow_farm(row)) for row in rows]
    assert ids.murmur(rows).tolist() == [signed(slow_murmur(row)) for row in rows]


def test_recis_1_and_2_hashes_of_a_byte_ragged():
    ragged = SimpleNamespace(
        values=torch.tensor([0, 1, 2, 1, 2, 3], dtype=torch.uint8), offsets=torch.tensor([0, 3, 6])
    )
    farm, murmur = ids.farm(ragged), ids.murmur(ragged)
    assert farm.dtype == murmur.dtype == torch.int64
    assert farm.tolist() == [-7736835464683084646, -5546720800891377920]
    assert murmur.tolist() == [-4003751876240412087, -1042754718167355375]


def test_recis_3_buckets_while_reading():
    hashes = ids.farm([bytes([0, 1, 2]), bytes([1, 2, 3])])
    assert ids.bucket(hashes).tolist() == [h + (1 << 63) for h in hashes.tolist()]
    assert ids.bucket(hashes, 1000).tolist() == [h % (1 << 64) % 1000 for h in hashes.tolist()]


def test_recis_4_mod_is_unsigned():
    assert ids.mod(torch.tensor([-1]), 10).tolist() == [5]
    assert ids.mod(torch.tensor([1001]), 1000).tolist() == [1]


def test_recis_6_murmur_of_a_pair_is_the_feature_cross():
    pairs = [struct.pack("<qq", a, b) for a, b in [(1001, 1), (1002, 2), (1003, 3)]]
    assert ids.murmur(pairs).tolist() == [-7808879811642834040, -4967483181219983279, 1752425377096056168]


def test_persia_6_prefix():
    assert (99 + 1) << (64 - 12) == 450359962737049600  # the reference states this prefix, not its group
    assert ids.prefix(torch.tensor([16000000000000000]), 99, 12).tolist() == [452849163854938115]


def test_persia_7_hash_stack():
    rows = ids.hash_stack(torch.tensor([12, 23, 34, 56, 78, 90]), rounds=2, size=10)
    assert rows.tolist() == [[2, 18], [5, 10], [0, 11], [6, 17], [7, 12], [8, 16]]


def test_strings_are_hashed_as_utf_8_one_by_one_or_together():
    words = ["", "a", "köln", "карван", "x" * 100]
    for hashed in (ids.farm, ids.murmur):
        assert hashed(words).tolist() == [hashed(word) for word in words]
        assert hashed([word.encode() for word in words]).tolist() == hashed(words).tolist()


def test_no_strings_give_no_hashes():
    nothing = SimpleNamespace(values=torch.empty(0, dtype=torch.uint8), offsets=torch.tensor([0]))
    for hashed in (ids.farm, ids.murmur):
        assert hashed([]).shape == (0,)
        assert hashed(nothing).shape == (0,)


def test_a_ragged_without_offsets_has_one_byte_per_row():
    ragged = SimpleNamespace(values=torch.tensor([7, 9], dtype=torch.uint8), offsets=None)
    assert ids.farm(ragged).tolist() == [ids.farm(b"\x07"), ids.farm(b"\x09")]


def test_a_ragged_need_not_be_contiguous():
    ragged = SimpleNamespace(
        values=torch.arange(12, dtype=torch.uint8)[::2], offsets=torch.tensor([0, 9, 2, 9, 6])[::2]
    )
    assert ids.farm(ragged).tolist() == [ids.farm(bytes([0, 2])), ids.farm(bytes([4, 6, 8, 10]))]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 1, 3], "must not decrease, but go from 2 to 1 at row 1"),
        ([-1, 3], "must not be negative, but start at -1"),
        ([0, 4], "must end within the 3 bytes, but end at 4"),
        ([], "must have rows \\+ 1 entries"),
    ],
)
def test_wrong_offsets_are_refused(offsets, message):
    ragged = SimpleNamespace(
        values=torch.zeros(3, dtype=torch.uint8), offsets=torch.tensor(offsets, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match=message):
        ids.farm(ragged)


def test_values_that_are_no_bytes_are_refused():
    with pytest.raises(TypeError, match=r"1-D torch\.uint8 or int8 values, but are torch\.int64"):
        ids.farm(SimpleNamespace(values=torch.tensor([1, 2]), offsets=torch.tensor([0, 2])))
    with pytest.raises(TypeError, match=r"must be an int64 tensor, but are torch\.int32"):
        ids.mod(torch.tensor([1], dtype=torch.int32), 10)
    with pytest.raises(TypeError, match="must be an int64 tensor, but are int"):
        ids.bucket(ids.farm("a"), 10)


@given(st.lists(INT64), st.integers(1, (1 << 63) - 1) | st.integers(1, 1000))
def test_mod_equals_unsigned_arithmetic(values, modulus):
    values = [*values, -1, 0, (1 << 63) - 1, -(1 << 63), modulus, modulus - 1]
    assert ids.mod(torch.tensor(values), modulus).tolist() == [(v & MASK) % modulus for v in values]


@given(st.lists(INT64), st.integers(0, (1 << 63) - 1))
def test_bucket_equals_unsigned_arithmetic(values, size):
    tensor = torch.tensor(values, dtype=torch.int64)
    expected = [(v & MASK) % size if size else v & (1 << 63) - 1 for v in values]
    assert ids.bucket(tensor, size).tolist() == expected


@given(st.lists(INT64), st.data())
def test_prefix_equals_unsigned_arithmetic_and_stays_in_its_group(values, data):
    bits = data.draw(st.integers(1, 63))
    group = data.draw(st.integers(0, (1 << bits) - 2))
    prefixed = ids.prefix(torch.tensor(values, dtype=torch.int64), group, bits).tolist()
    low = (1 << (64 - bits)) - 1
    assert prefixed == [signed((v & MASK) % low + ((group + 1) << (64 - bits))) for v in values]
    assert all((v & MASK) >> (64 - bits) == group + 1 for v in prefixed)


def test_a_group_that_does_not_fit_is_an_error():
    ids.prefix(torch.tensor([1]), 254, 8)
    for group in (255, 256, -1):
        with pytest.raises(ValueError, match=f"room for groups 0 to 254, but group is {group}"):
            ids.prefix(torch.tensor([1]), group, 8)
    with pytest.raises(ValueError, match="from 1 to 63 bits, but has 64"):
        ids.prefix(torch.tensor([1]), 0, 64)


@given(st.lists(INT64), st.integers(1, 5), st.integers(1, 1 << 60))
def test_hash_stack_equals_the_slow_reference(values, rounds, size):
    expected = []
    for value in values:
        hashed, row = value & MASK, []
        for r in range(rounds):
            hashed = slow_farm(hashed.to_bytes(8, "little"))
            row.append(hashed % size + r * size)
        expected.append(row)
    assert ids.hash_stack(torch.tensor(values, dtype=torch.int64), rounds, size).tolist() == expected


def test_hash_stack_keeps_the_shape_of_the_ids():
    rows = ids.hash_stack(torch.arange(1200).reshape(3, 400), rounds=4, size=50)
    assert rows.shape == (3, 400, 4)
    assert torch.equal(rows // 50, torch.arange(4).expand(3, 400, 4))
    assert torch.equal(ids.hash_stack(torch.arange(1200).reshape(3, 400).T, 4, 50), rows.transpose(0, 1))


def test_impossible_sizes_are_errors():
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="rounds must be at least 1, but is 0"):
        ids.hash_stack(one, 0, 10)
    with pytest.raises(ValueError, match="size is 0"):
        ids.hash_stack(one, 2, 0)
    with pytest.raises(ValueError, match="below 2\\^63"):
        ids.hash_stack(one, 2, 1 << 62)
    with pytest.raises(ValueError, match="but is -1"):
        ids.bucket(one, -1)
    with pytest.raises(ValueError, match="but is 0"):
        ids.mod(one, 0)


def test_native_functions_never_write_to_a_converted_copy():
    values, offsets = np.zeros(3, np.uint8), np.array([0, 3])
    with pytest.raises(TypeError):
        _native.hash_bytes("farm", values, offsets, np.zeros(1, np.int32))
    with pytest.raises(TypeError):
        _native.hash_bytes("farm", values, np.array([0, 1, 3]), np.zeros(4, np.int64)[::2])
    with pytest.raises(ValueError, match="out must have 1 entries, but has 2"):
        _native.hash_bytes("farm", values, offsets, np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="farm or murmur, received 'md5'"):
        _native.hash_bytes("md5", values, offsets, np.zeros(1, np.int64))


@given(hnp.arrays(np.int64, st.integers(0, 300), elements=INT64))
def test_hashes_of_keys_are_those_of_the_definition(keys):
    assert hashes_of(keys).tolist() == [ref.mix(key) for key in keys.tolist()]
    assert hashes_of(keys[::-2]).tolist() == [ref.mix(key) for key in keys[::-2].tolist()]


def test_hashes_of_keys_are_written_where_there_is_room_for_them():
    with pytest.raises(ValueError, match="out must have 3 entries, but has 2"):
        _native.mix(np.arange(3), np.zeros(2, np.uint64))


def test_hashes_take_strings_of_numpy_pandas_and_arrow():
    expected = ids.farm(["a", "bc", "ä"])
    for strings in (
        np.array(["a", "bc", "ä"]),
        np.array(["a", b"bc", "ä"], object),
        pd.Series(["a", "bc", "ä"]),
        pa.array(["a", "bc", "ä"]),
    ):
        assert torch.equal(ids.farm(strings), expected)
    assert ids.murmur(np.array([], "U1")).tolist() == []


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["a", None], "expects text or bytes, got None at position 1"),
        (pd.Series(["a", None], dtype=object), "expects text or bytes, got None at position 1"),
        (np.array([1, 2]), "expects text or bytes, got 1 at position 0"),
        (torch.tensor([1, 2]), "got a tensor of torch.int64"),
        (np.array([["a"]]), r"got an array of shape \(1, 1\)"),
        (5, "expects text, bytes or a list of them, got int"),
    ],
)
def test_what_is_no_text_is_not_hashed(strings, message):
    with pytest.raises(TypeError, match=message):
        ids.farm(strings)
