import copy
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import TableSource, decode, records_of

from karvan.data.loading.loader import Loader
from karvan.data.loading.rank_shares import merge


def loaders(world, **settings):
    return [
        Loader(
            TableSource([60, 7]), decode, 4, **{"split_records": 3, **settings}, rank=rank, world_size=world
        )
        for rank in range(world)
    ]


def take(loader, batches):
    iterator = iter(loader)
    return [next(iterator) for _ in range(batches)]


def test_the_states_of_a_loader_stay_as_they_were_and_are_the_callers_own():
    first = loaders(2, epochs=2)
    for loader in first:
        take(loader, 3)
    loader = loaders(3, epochs=2)[1]
    loader.load_state_dict(merge(each.state_dict() for each in first))
    handed_out = []
    for _ in loader:
        state = loader.state_dict()
        handed_out.append((state, copy.deepcopy(state)))
    assert all(state == as_it_was for state, as_it_was in handed_out)
    last = copy.deepcopy(state)
    state["settings"]["seed"] = 99
    state["earlier"][0]["places"][0][1] = 99
    state["places"][0][1] = 99
    assert loader.state_dict() == last


def test_a_position_is_the_epoch_and_the_records_and_batches_that_were_handed_out():
    loader = Loader(TableSource([40]), decode, 6, split_records=10, prefetch=8, epochs=2)
    iterator = iter(loader)
    assert loader.state_dict()["places"] == [[0, 0, 0, 0]]
    next(iterator), next(iterator)
    assert loader.state_dict()["places"] == [[0, 0, 12, 2]]
    for _ in range(5):
        next(iterator)
    assert loader.state_dict()["places"] == [[0, 1, 0, 7]]
    next(iterator)
    assert loader.state_dict()["places"] == [[0, 1, 6, 8]]
    assert list(iterator)
    assert loader.state_dict()["places"] == [[0, 2, 0, 14]]


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.randoms(use_true_random=False))
def test_merging_takes_any_order_repeated_states_and_states_that_know_less(batches, rng):
    ranks = loaders(3, epochs=2)
    early = [each.state_dict() for each in ranks]
    for each, number in zip(ranks, batches, strict=True):
        take(each, number)
    late = [each.state_dict() for each in ranks]
    expected = merge(late)
    assert [place[:1] + place[3:] for place in expected["places"]] == [[r, n] for r, n in enumerate(batches)]
    states = [*early, *late, *late, merge(early), merge([late[1], early[2]])]
    rng.shuffle(states)
    assert merge(states) == expected
    assert json.loads(json.dumps(expected)) == expected


def test_a_position_takes_a_few_numbers_however_many_blocks_and_epochs_are_done():
    rng = random.Random(1)
    sizes = [rng.randrange(1, 40) for _ in range(400)]
    ranks = [
        Loader(TableSource(sizes), decode, 50, split_records=2, shuffle=20, rank=rank, world_size=3, epochs=3)
        for rank in range(3)
    ]
    taken = sum(batch.samples for rank, loader in enumerate(ranks) for batch in take(loader, 40 + 50 * rank))
    merged = merge(each.state_dict() for each in ranks)
    assert len(json.dumps(merged)) < 500
    alone = Loader(TableSource(sizes), decode, 50, split_records=2, shuffle=20, epochs=3)
    alone.load_state_dict(merged)
    assert sum(batch.samples for batch in alone) == 3 * sum(sizes) - taken
    assert len(json.dumps(alone.state_dict())) < 500


def test_earlier_divisions_are_forgotten_when_all_their_epochs_are_complete():
    position = None
    for world, epochs, batches in [(2, 1, 3), (3, 1, 2), (2, 2, 8), (1, 2, 5), (2, 2, 2)]:
        ranks = loaders(world, epochs=epochs)
        for each in ranks:
            if position:
                each.load_state_dict(position)
            for _, _ in zip(range(batches), each, strict=False):
                pass
        position = merge(each.state_dict() for each in ranks)
        assert [division["world"] for division in position["earlier"]] == {
            (2, 3): [],
            (3, 2): [2],
            (2, 8): [2, 3],
            (1, 5): [2],
            (2, 2): [2, 1],
        }[world, batches]


def test_a_position_of_other_data_or_order_is_refused_and_says_what_differs():
    state = Loader(TableSource([40]), decode, 6, seed=1, shuffle=4).state_dict()
    with pytest.raises(ValueError, match=r"differs: seed 1 \(here 2\)\."):
        Loader(TableSource([40]), decode, 6, seed=2, shuffle=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"records 40 \(here 41\)"):
        Loader(TableSource([41]), decode, 6, seed=1, shuffle=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"version 2, but has 1\. Another version of karvan"):
        Loader(TableSource([40]), decode, 6).load_state_dict({**state, "version": 1})


def test_the_batch_size_may_change_between_stop_and_resume():
    loader = Loader(TableSource([40]), decode, 6)
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    other = Loader(TableSource([40]), decode, 11)
    other.load_state_dict(loader.state_dict())
    assert records_of(first) + records_of(other) == list(range(40))


def test_the_position_of_some_ranks_is_refused_where_it_would_repeat_records():
    def loader(rank, world):
        return Loader(TableSource([40]), decode, 6, rank=rank, world_size=world)

    states = [loader(rank, 3).state_dict() for rank in range(3)]
    for rank, world, state in [(0, 2, states[0]), (1, 3, states[0]), (0, 1, merge(states[:2]))]:
        with pytest.raises(ValueError, match=rf"Rank {rank} of {world} needs its own position"):
            loader(rank, world).load_state_dict(state)
    loader(1, 3).load_state_dict(states[1])
    loader(1, 2).load_state_dict(merge(states))


def test_positions_of_different_jobs_do_not_merge():
    def state(**settings):
        return Loader(TableSource([40]), decode, 6, **settings).state_dict()

    with pytest.raises(ValueError, match="received none"):
        merge([])
    with pytest.raises(ValueError, match="worlds are 2 and 1"):
        merge([state(world_size=2), state()])
    with pytest.raises(ValueError, match="seed"):
        merge([state(), state(seed=4)])
    began = state(world_size=2)
    took = loaders(1)[0].state_dict()
    assert began["earlier"] == took["earlier"] == []
    resumed = {**began, "earlier": [{"world": 1, "places": [[0, 0, 5, 1]]}]}
    with pytest.raises(ValueError, match=r"resumed from different positions: all ranks .* the same merged"):
        merge([began, resumed])


def test_more_epochs_can_be_asked_for_when_resuming():
    loader = Loader(TableSource([10]), decode, 6)
    list(loader)
    for epochs, expected in ((1, 0), (3, 20)):
        longer = Loader(TableSource([10]), decode, 6, epochs=epochs)
        longer.load_state_dict(loader.state_dict())
        assert len(records_of(longer)) == expected


def test_a_later_iteration_can_be_resumed_in_the_middle():
    loader = Loader(TableSource([10]), decode, 5, shuffle=10)
    list(loader)
    first = next(iter(loader))
    other = Loader(TableSource([10]), decode, 5, shuffle=10)
    other.load_state_dict(loader.state_dict())
    assert sorted(records_of([first, *other])) == list(range(10))
