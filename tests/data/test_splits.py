import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from karvan.data.in_memory import open_frame
from karvan.data.loading.rank_shares import (
    ShufflePlan,
    blocks,
    cut,
    default_split_records,
    permutation,
    shuffled,
)
from karvan.data.loading.settings import ReadSettings
from karvan.data.source import Part, Split

parts_of_any_sizes = st.lists(st.integers(0, 60), max_size=6).map(
    lambda sizes: [Part(f"f{i}", size) for i, size in enumerate(sizes)]
)


def test_two_files_of_ten_by_three_are_eight_splits_and_the_last_of_each_has_one_record():
    splits = cut([Part("f1", 10), Part("f2", 10)], 3)
    spans = [(s.path, s.first, s.first + s.count) for s in splits]
    assert len(spans) == 8
    for path in ("f1", "f2"):
        assert [s[1:] for s in spans if s[0] == path] == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_ten_records_by_three_are_three_full_splits_and_a_rest():
    assert [(s.first, s.count) for s in cut([Part("f", 10)], 3)] == [(0, 3), (3, 3), (6, 3), (9, 1)]


@given(parts_of_any_sizes, st.integers(1, 70))
def test_splits_tile_every_part_exactly(parts, size):
    splits = cut(parts, size)
    assert all(0 < split.count <= size for split in splits)
    covered = [(s.path, record) for s in splits for record in range(s.first, s.first + s.count)]
    assert covered == [(part.path, record) for part in parts for record in range(part.records)]


def test_a_split_of_no_records_is_refused():
    with pytest.raises(ValueError, match="at least 1 record, but records_per_split is 0"):
        cut([Part("f", 3)], 0)


@given(st.integers(0, 200), st.integers(0, 2**70), st.integers(0, 5))
def test_a_permutation_has_every_number_once_and_depends_on_its_seeds_only(count, seed, epoch):
    order = permutation(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert np.array_equal(order, permutation(count, seed, epoch))


PINNED = [6, 4, 1, 3, 7, 0, 2, 5]


def test_permutations_are_pinned_because_checkpoints_depend_on_them():
    assert permutation(8, 0, 0).tolist() == PINNED
    assert permutation(8, 0, 1).tolist() != PINNED
    assert permutation(8, 1, 0).tolist() != PINNED


@given(st.integers(0, 200), st.integers(1, 210), st.integers(0, 9))
def test_a_permutation_by_windows_sorts_each_window_by_the_same_hashes(count, window, seed):
    whole = permutation(count, seed)
    place = np.empty(count, dtype=np.int64)
    place[whole] = np.arange(count)
    expected = sorted(
        range(count), key=lambda number: (number // window, place[number] if window > 1 else number)
    )
    assert permutation(count, seed, window=window).tolist() == expected


def test_every_place_is_equally_likely_in_a_shuffle():
    counts = np.zeros((6, 6))
    for seed in range(3000):
        counts[np.arange(6), permutation(6, seed)] += 1
    assert abs(counts - 500).max() < 110  # five standard deviations


@given(parts_of_any_sizes, st.integers(1, 20), st.integers(1, 50), st.integers(0, 3))
def test_blocks_hold_every_record_once_and_about_as_many_as_asked(parts, size, records, seed):
    splits = shuffled(cut(parts, size), seed)
    grouped = blocks(splits, records)
    assert [block.number for block in grouped] == list(range(len(grouped)))
    assert all(records <= block.records < records + size for block in grouped[:-1])
    covered = [
        (s.path, r) for block in grouped for s in block.splits for r in range(s.first, s.first + s.count)
    ]
    assert sorted(covered) == [(part.path, record) for part in parts for record in range(part.records)]


def test_splits_that_touch_are_read_together_inside_a_block():
    splits = [Split("a", 10, 5), Split("b", 0, 5), Split("a", 5, 5), Split("a", 20, 5)]
    assert blocks(splits, 20)[0].splits == (Split("a", 5, 10), Split("a", 20, 5), Split("b", 0, 5))


def test_every_epoch_has_its_own_order_of_splits_and_without_shuffle_the_one_of_the_files():
    parts = [Part("a", 100), Part("b", 100)]
    plan = ShufflePlan(parts, shuffle=20, seed=3, split_records=5)
    assert plan.blocks(0) != plan.blocks(1)
    assert plan.blocks(0) == ShufflePlan(parts, shuffle=20, seed=3, split_records=5).blocks(0)
    still = ShufflePlan(parts, split_records=5)
    assert [s for block in still.blocks(1) for s in block.splits] == cut(parts, 5)


def test_default_splits_are_fine_enough_to_mix_and_not_small_because_the_shuffle_is():
    assert default_split_records([Part("a", 640)], 0) == 10
    assert default_split_records([Part("a", 640)], 4) == 10
    assert default_split_records([Part("a", 10**9)], 0) == 65_536
    assert default_split_records([Part("a", 10**9)], 16) == 8_192
    assert default_split_records([Part("a", 10**9)], 20_000) == 20_000
    assert default_split_records([Part("a", 10**9)], 10**6) == 65_536
    assert default_split_records([], 0) == 1


def test_default_splits_of_files_with_groups_are_the_groups():
    assert default_split_records([Part("a", 1000)], 10, 400) == 400
    assert default_split_records([Part("a", 1000)], 0, 400) == 400
    assert default_split_records([Part("a", 64_000)], 0, 400) == 400


@given(parts_of_any_sizes, st.integers(1, 70), st.integers(1, 70), st.integers(0, 2))
def test_a_plan_has_every_record_once_and_moves_none_further_than_the_shuffle(parts, size, shuffle, epoch):
    plan = ShufflePlan(parts, shuffle=shuffle, split_records=size)
    covered = []
    for block in plan.blocks(epoch):
        records = [(s.path, r) for s in block.splits for r in range(s.first, s.first + s.count)]
        order = plan.order(epoch, block)
        assert sorted(order.tolist()) == list(range(len(records)))
        assert abs(order - np.arange(len(order))).max() < shuffle + min(size, shuffle)
        covered += records
    assert sorted(covered) == [(part.path, record) for part in parts for record in range(part.records)]


def test_blocks_of_large_splits_are_bounded_and_not_small_because_the_shuffle_is():
    for shuffle, most in ((1, 8_192), (100, 8_192), (20_000, 20_000)):
        plan = ShufflePlan([Part("a", 200_000)], shuffle=shuffle, split_records=50_000)
        assert {most // 2 < block.records <= most for block in plan.blocks(0)} == {True}


@pytest.mark.parametrize("shuffle", [True, False, 2.0, "100", None])
def test_a_shuffle_that_is_no_number_of_records_is_refused(shuffle):
    with pytest.raises(
        TypeError, match=rf"shuffled at a time, 0 for none, but is {shuffle!r}: expected a num"
    ):
        ReadSettings(open_frame({"a": [1]}), lambda records: records, 1, shuffle=shuffle)
