import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import TableSource, decode, records_of

from karvan.data.loader import Loader
from karvan.data.position import Position, Receipt, merge

receipts = st.lists(
    st.builds(Receipt, st.integers(0, 4), st.integers(0, 12), st.integers(1, 9), st.booleans()), max_size=30
)


def position_of(receipts):
    position = Position()
    for receipt in receipts:
        position.add(receipt)
    return position


def contents(position):
    """Everything a position says, plainly."""
    return {
        (epoch, block): "done" if block in progress.done else progress.partial.get(block, 0)
        for epoch in range(5)
        for progress in [position.progress(epoch)]
        for block in range(13)
    } | {"epoch": position.epoch}


@given(receipts)
def test_a_position_survives_json(receipts):
    position = position_of(receipts)
    again = Position.from_state(json.loads(json.dumps(position.state())))
    assert contents(again) == contents(position)
    assert again.state() == position.state()


def plainly(state):
    """What a position's state says of each block that was begun, spelled out."""
    said = {}
    for entry in state["progress"]:
        for epoch in range(entry["epoch"], entry["epoch"] + entry["epochs"]):
            for first, count, step in entry["done"]:
                blocks = [(epoch, first + number * step) for number in range(count)]
                assert not said.keys() & set(blocks)
                said |= dict.fromkeys(blocks, "done")
            assert entry["partial"] == sorted(entry["partial"])
            said |= {(epoch, block): records for block, records in entry["partial"]}
    return said


@given(st.lists(st.one_of(receipts, st.integers(0, 4)), max_size=6))
def test_a_state_says_what_was_counted_and_stays_as_it_was_handed_out(changes):
    position, expected, handed_out = Position(), {}, []
    for change in changes:
        if isinstance(change, int):
            position.advance(change)
        else:
            for epoch, block, records, complete in change:
                position.add(Receipt(epoch, block, records, complete))
                before = expected.get((epoch, block), 0)
                expected[epoch, block] = "done" if complete or before == "done" else max(before, records)
        expected = {place: said for place, said in expected.items() if place[0] >= position.epoch}
        state = position.state()
        assert plainly(state) == expected
        assert plainly(Position.from_state(state).state()) == expected
        handed_out.append((state, copy.deepcopy(state)))
    assert all(state == as_it_was for state, as_it_was in handed_out)


def test_the_states_of_a_loader_stay_as_they_were_and_are_the_callers_own():
    loader = Loader(TableSource([60]), decode, 4, split_records=3, epochs=2, rank=1, world=2)
    handed_out = []
    for _ in loader:
        state = loader.state_dict()
        handed_out.append((state, copy.deepcopy(state)))
    assert all(state == as_it_was for state, as_it_was in handed_out)
    last = copy.deepcopy(state)
    for entry in state["position"]["progress"]:
        entry["done"][0][1] = 99
    state["settings"]["seed"] = 99
    assert loader.state_dict() == last


def test_positions_that_were_saved_by_earlier_versions_load():
    done = {0, 1, 2, 5, 6, 7, 11}
    progress = [
        {"epoch": 1, "epochs": 2, "done": [[0, 3, 1], [5, 1, 3], [6, 2, 1], [11, 1, 4]], "partial": [[3, 2]]}
    ]
    position = Position.from_state({"epoch": 1, "steps": 7, "progress": progress})
    for epoch in (1, 2):
        assert position.progress(epoch).done == done
        assert position.progress(epoch).partial == {3: 2}
    assert (position.epoch, position.steps) == (1, 7)
    assert plainly(position.state()) == plainly({"progress": progress})


def _at(done, rank=0, world=1):
    """A loader that has handed out so many of its blocks."""
    loader = Loader(TableSource([20_000]), decode, 5, split_records=1, rank=rank, world=world)
    for number in range(done):
        loader._position.add(Receipt(0, rank + number * world, 1, True))
    return loader


def test_a_position_of_ranks_that_are_not_level_takes_a_few_numbers():
    merged = merge(_at(done, rank, 4).state_dict() for rank, done in enumerate((1000, 900, 3, 600)))
    (entry,) = merged["position"]["progress"]
    assert sorted(entry["done"]) == [[0, 1000, 4], [1, 900, 4], [2, 3, 4], [3, 600, 4]]
    level = merge(_at(1000, rank, 4).state_dict() for rank in range(4))
    assert level["position"]["progress"][0]["done"] == [[0, 4000, 1]]


@given(receipts, receipts, st.integers(0, 4))
def test_joining_is_a_union_in_any_order_and_repeating_it_changes_nothing(left, right, epoch):
    one, two = position_of(left), position_of(right)
    two.advance(epoch)
    both, turned = position_of([]), position_of([])
    for position in (one, two, one):
        both.join(position)
    for position in (two, one):
        turned.join(position)
    assert contents(both) == contents(turned)
    every = position_of([*left, *right])
    every.advance(epoch)
    assert contents(both) == contents(every)


def test_a_rank_that_knows_less_of_a_block_does_not_take_it_back():
    ahead, behind = position_of([Receipt(0, 2, 7, False)]), position_of([Receipt(0, 2, 3, False)])
    finished = position_of([Receipt(0, 2, 9, True)])
    for order in ([ahead, behind], [behind, ahead]):
        joined = Position()
        for position in order:
            joined.join(position)
        assert joined.progress(0).partial == {2: 7}
    finished.join(ahead)
    assert finished.progress(0).partial == {}
    assert finished.progress(0).done == {2}


def test_a_position_takes_a_few_numbers_however_many_blocks_and_epochs_are_done():
    position = Position()
    for epoch in range(50):
        for block in range(3, 4000, 4):
            position.add(Receipt(epoch, block, 10, True))
    assert position.state()["progress"] == [
        {"epoch": 0, "epochs": 50, "done": [[3, 1000, 4]], "partial": []},
    ]
    loader = Loader(TableSource([4000]), decode, 7, split_records=2, shuffle=20, rank=1, world=3, epochs=4)
    list(loader)
    assert len(json.dumps(loader.state_dict())) < 1000


def test_a_single_rank_forgets_the_details_of_complete_epochs():
    loader = Loader(TableSource([20]), decode, 5, epochs=3, split_records=5)
    list(loader)
    assert loader.state_dict()["position"] == {"epoch": 3, "steps": 12, "progress": []}


def test_the_position_counts_records_of_batches_that_were_handed_out_only():
    loader = Loader(TableSource([40]), decode, 6, split_records=10, prefetch=8)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    progress = loader.state_dict()["position"]["progress"]
    assert progress == [{"epoch": 0, "epochs": 1, "done": [[0, 1, 1]], "partial": [[1, 2]]}]


def test_a_position_of_other_data_or_order_is_refused_and_says_what_differs():
    state = Loader(TableSource([40]), decode, 6, seed=1, shuffle=4).state_dict()
    with pytest.raises(ValueError, match=r"differs: seed 1 \(here 2\)\."):
        Loader(TableSource([40]), decode, 6, seed=2, shuffle=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"records 40 \(here 41\)"):
        Loader(TableSource([41]), decode, 6, seed=1, shuffle=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"version 1, but has 7"):
        Loader(TableSource([40]), decode, 6).load_state_dict({**state, "version": 7})


def test_the_batch_size_may_change_between_stop_and_resume():
    loader = Loader(TableSource([40]), decode, 6)
    iterator = iter(loader)
    first = [next(iterator), next(iterator)]
    other = Loader(TableSource([40]), decode, 11)
    other.load_state_dict(loader.state_dict())
    assert records_of(first) + records_of(other) == list(range(40))


def test_the_position_of_some_ranks_is_refused_where_it_would_repeat_records():
    def loader(rank, world):
        return Loader(TableSource([40]), decode, 6, rank=rank, world=world)

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
        merge([state(world=2), state()])
    with pytest.raises(ValueError, match="seed"):
        merge([state(), state(seed=4)])


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
