"""Which rank owns a key, against plain Python: each key has one owner, and ranges of hashes cover all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from reference import MASK64, mix

from karvan.store.messages import counters_of, first_hash_of, hashes_of, owners_of

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50)
RANKS = st.integers(1, 200)
HASHES = st.lists(st.integers(0, MASK64), max_size=50)


@given(KEYS)
def test_hashes_are_those_of_the_definition(keys):
    assert hashes_of(np.array(keys, np.int64)).tolist() == [mix(key) for key in keys]


@given(HASHES, RANKS)
def test_every_hash_has_the_one_owner_whose_range_it_is_in(hashes, ranks):
    firsts = [first_hash_of(rank, ranks) for rank in range(ranks + 1)]
    hashes += [each for first in firsts[:-1] for each in (first, max(0, first - 1))]  # the ends of ranges
    owners = owners_of(np.array(hashes, np.uint64), ranks).tolist()
    expected = [[rank for rank in range(ranks) if firsts[rank] <= each < firsts[rank + 1]] for each in hashes]
    assert [[owner] for owner in owners] == expected


@given(RANKS)
def test_ranges_cover_all_hashes_and_differ_by_little(ranks):
    firsts = [first_hash_of(rank, ranks) for rank in range(ranks + 1)]
    assert (firsts[0], firsts[-1]) == (0, 2**64)
    sizes = np.diff([first >> 32 for first in firsts])
    assert sizes.min() > 0
    assert sizes.max() - sizes.min() <= 1


@given(st.integers(1, 40), st.integers(1, 30), HASHES)
def test_counters_of_a_range_include_those_of_each_of_its_hashes(blocks, ranks, hashes):
    """A block of 64 counters belongs to a hash by its position among all hashes."""
    counters = blocks * 64
    for rank in range(ranks):
        first, end = (first_hash_of(each, ranks) for each in (rank, rank + 1))
        found = counters_of(first >> 32, end >> 32, counters)
        inside = [each for each in hashes if first <= each < end] + [first, end - 1]
        assert all(found.start <= (each * blocks >> 64) * 64 < found.stop for each in inside)
        # … and no more than those of the first and last hash: blocks at the ends are shared with neighbours.
        assert found == slice((first * blocks >> 64) * 64, ((end - 1) * blocks >> 64) * 64 + 64)
