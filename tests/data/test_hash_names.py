"""A hash has one meaning: the same string has the same id by every way to hash it."""

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan import ids
from karvan.ragged import Ragged

MASK = (1 << 64) - 1


def as_bytes(words):
    return Ragged.from_lists([list(word.encode()) for word in words], dtype=torch.uint8)


def read(words, **options):
    (batch,) = kv.data.read(
        {"x": pa.array(words, pa.string())}, max(len(words), 1), columns=[kv.data.Varlen("x", **options)]
    )
    return batch["x"].values.tolist()


def by_feature(words, kind, **options):
    made = kv.FeatureEngine([kv.Feature("x").hash(kind, **options)])({"x": as_bytes(words)})
    return made["x"].tolist()


@given(
    st.lists(st.text(max_size=20), min_size=1, max_size=5),
    st.sampled_from(["farm", "murmur"]),
    st.none() | st.sampled_from([0, 1, 1000, (1 << 62) + 1]),
)
def test_reading_features_and_kv_ids_give_a_string_the_same_id(words, kind, bucket):
    whole = [getattr(ids, kind)(word) for word in words]
    if bucket is None:
        expected = whole
    else:
        expected = [h & (1 << 63) - 1 if bucket == 0 else (h & MASK) % bucket for h in whole]
    assert read(words, hash=kind, bucket=bucket) == expected
    assert by_feature(words, kind, bucket=bucket) == expected
    assert ids.hash_strings(words, kind, bucket).tolist() == expected


@given(st.lists(st.text(max_size=20), min_size=1, max_size=5), st.sampled_from(["farm", "murmur"]))
def test_the_63_bits_of_recis_have_names_of_their_own(words, kind):
    expected = [getattr(ids, kind)(word) & (1 << 63) - 1 for word in words]
    assert read(words, hash=f"{kind}63") == expected
    assert by_feature(words, f"{kind}63") == expected
    assert ids.hash_strings(words, f"{kind}63").tolist() == expected


def test_a_name_without_meaning_is_refused_by_all():
    for make in (
        lambda kind, bucket: kv.data.Varlen("x", kind, bucket),
        lambda kind, bucket: kv.Feature("x").hash(kind, bucket),
        lambda kind, bucket: ids.hash_strings(["a"], kind, bucket),
    ):
        with pytest.raises(ValueError, match=r"farm63.*'md5'"):
            make("md5", None)
        with pytest.raises(ValueError, match=r"bucket.*farm63"):
            make("farm63", 10)
        with pytest.raises(ValueError, match="-1"):
            make("farm", -1)


def test_an_empty_word_is_hashed_as_any_other():
    assert read([""], hash="farm") == [ids.farm("")]
