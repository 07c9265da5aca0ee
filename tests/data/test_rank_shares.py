"""Shares of ranks are even, whatever the data, the shuffle, the ranks and the stops are."""

import logging
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loader_helpers import TableSource, decode, records_of

from karvan.data.loading.loader import Loader
from karvan.data.loading.rank_shares import Piece, count, deal, merge, share_records

sizes_of_parts = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=1, max_size=60),  # many tiny files, some empty
    st.integers(1, 400).map(lambda size: [size]),  # one large file
    st.tuples(st.lists(st.just(1), max_size=20), st.integers(50, 300)).map(lambda each: [*each[0], each[1]]),
)
pieces = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True)),
    max_size=40,
).map(
    lambda blocks: [
        Piece(number, first + before, first + after)
        for number, (first, ends) in enumerate(blocks)
        for before, after in zip([0, *sorted(ends)], sorted(ends), strict=False)
        if (before + number) % 3
    ]
)


def spelled_out(share):
    return [(block, record) for block, first, end in share for record in range(first, end)]


@given(pieces, st.integers(1, 9))
def test_dealing_divides_every_record_once_and_evenly(given_pieces, world):
    shares = deal(given_pieces, world)
    assert sorted(record for share in shares for record in spelled_out(share)) == spelled_out(given_pieces)
    assert all(spelled_out(share) == sorted(spelled_out(share)) for share in shares)
    total = count(given_pieces)
    assert [count(share) for share in shares] == [share_records(total, rank, world) for rank in range(world)]
    assert sum(share_records(total, rank, world) for rank in range(world)) == total
    assert max(map(count, shares)) - min(map(count, shares)) <= 1


@given(st.lists(st.integers(1, 9), max_size=200), st.integers(1, 9))
def test_all_but_a_few_blocks_have_one_reader(sizes, world):
    shares = deal([Piece(number, 0, size) for number, size in enumerate(sizes)], world)
    readers = Counter(block for share in shares for block in {piece.block for piece in share})
    assert sum(readers.values()) <= len(sizes) + world - 1


def test_equal_blocks_are_dealt_in_turns_and_the_last_ones_cut():
    shares = deal([Piece(number, 0, 10) for number in range(8)], 3)
    assert [[piece.block for piece in share] for share in shares] == [[0, 3, 6], [1, 4, 6, 7], [2, 5, 7]]
    assert [share[2:] for share in shares] == [
        [Piece(6, 0, 7)],
        [Piece(6, 7, 10), Piece(7, 0, 4)],
        [Piece(7, 4, 10)],
    ]


def test_dealing_is_pinned_because_checkpoints_depend_on_it():
    shares = deal([Piece(number, 0, size) for number, size in enumerate([5, 1, 1, 7, 3, 2, 9, 4])], 3)
    assert shares == [
        [Piece(0, 0, 5), Piece(6, 0, 6)],
        [Piece(1, 0, 1), Piece(3, 0, 7), Piece(6, 6, 9)],
        [Piece(2, 0, 1), Piece(4, 0, 3), Piece(5, 0, 2), Piece(7, 0, 4)],
    ]


@pytest.mark.parametrize("shuffle", [0, 1, 100, 1000, 10_000])
@pytest.mark.parametrize("sizes", [[5000], [2500, 1, 0, 2499], [50] * 100])
def test_every_rank_has_an_even_share(sizes, shuffle):
    rows = [
        sum(
            batch.samples
            for batch in Loader(TableSource(sizes), decode, 64, shuffle=shuffle, rank=rank, world_size=8)
        )
        for rank in range(8)
    ]
    assert rows == [625] * 8


def run(source, world, position, batches_of_rank, **options):
    """What ranks hand out from a position on until they stop, each after so many batches or at the end."""
    got, states, finished = [], [], []
    for rank in range(world):
        loader = Loader(source, decode, rank=rank, world_size=world, **options)
        if position is not None:
            loader.load_state_dict(position)
        expected, taken = loader.batches_left, []
        for batch in loader:
            taken.append(batch)
            assert loader.batches_left == expected - len(taken)
            if len(taken) == batches_of_rank[rank]:
                break
        got.append(records_of(taken))
        finished.append(len(taken) == expected)
        states.append(loader.state_dict())
    return got, merge(states), all(finished)


@settings(deadline=None)
@given(
    sizes=sizes_of_parts,
    shuffle=st.sampled_from([0, 1, 3, 10, 1000]),
    split_records=st.sampled_from([1, 3, 8, 50, None]),
    batch_size=st.integers(1, 30),
    stops=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(1, 6), min_size=5, max_size=5)), max_size=4
    ),
    last_world=st.integers(1, 5),
)
@example([100], 1000, None, 10, [(3, [1, 2, 3, 1, 1]), (2, [1, 1, 1, 1, 1]), (2, [1, 2, 1, 1, 1])], 5)
def test_what_is_left_is_divided_evenly_after_any_stops_and_every_record_comes_once(
    sizes, shuffle, split_records, batch_size, stops, last_world
):
    """The reference is a set: what is left must be handed out, in shares that differ by one record at most.

    After a stop on the same number of ranks, the division stays: shares are counted from its beginning.
    """
    source = TableSource(sizes)
    options = {"batch_size": batch_size, "shuffle": shuffle, "split_records": split_records}
    left, position, world_before, shares = set(range(source.total)), None, None, []
    for world, batches_of_rank in [*stops, (last_world, [10**6] * 5)]:
        if world != world_before:
            shares = [share_records(len(left), rank, world) for rank in range(world)]
        got, position, _ = run(source, world, position, batches_of_rank, **options)
        for rank, records in enumerate(got):
            assert len(records) == min(shares[rank], batches_of_rank[rank] * batch_size)
            assert left >= set(records)
            left -= set(records)
            shares[rank] -= len(records)
        world_before = world
    assert not left
    assert sum(shares) == 0


@given(
    sizes=sizes_of_parts,
    shuffle=st.sampled_from([0, 1, 10, 1000]),
    stops=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3),
    world=st.integers(1, 4),
    stop=st.integers(1, 9),
)
def test_after_a_change_of_ranks_a_second_stop_continues_with_the_very_batches(
    sizes, shuffle, stops, world, stop
):
    source = TableSource(sizes)
    options = {"batch_size": 7, "shuffle": shuffle, "epochs": 3}
    position = None
    for stopped_world, batches in stops:
        _, position, _ = run(
            source, stopped_world, position, [batches + rank for rank in range(4)], **options
        )
    whole, _, _ = run(source, world, position, [10**6] * 4, **options)
    began, middle, _ = run(source, world, position, [stop] * 4, **options)
    rest, _, finished = run(source, world, middle, [10**6] * 4, **options)
    assert [a + b for a, b in zip(began, rest, strict=True)] == whole
    assert finished


def warnings_of(caplog, records=20, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="karvan.data"):
        loader = Loader(TableSource([records]), decode, **options)
        list(loader), list(loader)
    return [record.getMessage() for record in caplog.records]


def test_a_rank_without_batches_says_why_once(caplog):
    assert warnings_of(caplog, batch_size=1, rank=20, world_size=30) == [
        "Rank 20 of 30 gets no batches: there are only 20 records, and each of the first ranks has one."
    ]
    assert warnings_of(caplog, records=1, batch_size=1, rank=1, world_size=2) == [
        "Rank 1 of 2 gets no batches: there is only 1 record, and the first rank has it."
    ]
    assert warnings_of(caplog, batch_size=8, rank=1, world_size=3, drop_remainder=True) == [
        "Rank 1 of 3 gets no batches: it has 7 of 20 records, and drop_remainder drops them, because they "
        "are fewer than batch_size=8."
    ]


@pytest.mark.parametrize(
    "options", [{"rank": 19, "world_size": 30}, {"rank": 2, "world_size": 3}, {"drop_remainder": True}]
)
def test_a_rank_with_batches_does_not_warn(caplog, options):
    assert warnings_of(caplog, batch_size=6, **options) == []


def test_no_data_at_all_is_no_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="karvan.data"):
        assert list(Loader(TableSource([0, 0]), decode, 4, rank=1, world_size=2)) == []
    assert not caplog.records
