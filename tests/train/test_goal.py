"""How many steps a fit will have, which progress shows."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import karvan as kv
from karvan.train.epoch import Accumulation
from karvan.train.results import TrainingCounts
from karvan.train.stopping import Goal


def read(records, rank=0, world_size=1, batch_size=10, **options):
    return kv.data.read({"x": np.arange(records)}, batch_size, rank=rank, world_size=world_size, **options)


def goal(epochs=1, max_steps=None):
    return Goal(epochs, max_steps, None, None)


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_the_end_is_that_of_the_rank_with_the_most_batches(records, world, epochs, accumulate, drop):
    loaders = [read(records, rank, world, drop_remainder=drop) for rank in range(world)]
    longest = max(len(list(loader)) for loader in loaders)
    passes = Accumulation(gradient_accumulation_steps=accumulate, world_size=world)
    steps = goal(epochs).steps(loaders[0], passes, TrainingCounts())
    assert steps == epochs * -(-longest // accumulate)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6))
def test_the_end_is_known_when_an_epoch_is_resumed_on_any_number_of_ranks(before, after, taken):
    first = [read(250, rank, before) for rank in range(before)]
    for loader in first:
        list(islice(loader, taken))
    position = kv.data.merge(loader.state_dict() for loader in first)
    second = [read(250, rank, after) for rank in range(after)]
    for loader in second:
        loader.load_state_dict(position)
    expected = goal(3).steps(
        second[0], Accumulation(world_size=after), TrainingCounts(step=taken, batches=taken)
    )
    left = max(len(list(loader)) for loader in second)
    assert expected == taken + left + 2 * max(map(len, second))


def test_batches_without_a_position_are_counted_from_the_beginning():
    batches, passes = [{}] * 7, Accumulation(gradient_accumulation_steps=2)
    assert goal(3).steps(batches, passes, TrainingCounts()) == 12
    assert goal(3).steps(batches, passes, TrainingCounts(step=6, epoch=1, batches=4)) == 12
    assert goal(3).steps(batches, passes, TrainingCounts(step=12, epoch=3)) == 12
    assert goal(3, max_steps=5).steps(batches, passes, TrainingCounts()) == 5


def test_without_an_end_only_the_steps_that_were_asked_for_are_known():
    endless = read(100, epochs=None)
    assert goal().steps(endless, Accumulation(), TrainingCounts()) is None
    assert goal(1, max_steps=9).steps(endless, Accumulation(), TrainingCounts()) == 9
    assert goal().steps(iter([{}]), Accumulation(), TrainingCounts()) is None


@pytest.mark.parametrize("name", ["epochs", "max_steps", "eval_every"])
def test_a_bool_is_no_number_of_epochs_or_steps(name):
    options = {"epochs": None, "max_steps": None, "eval_data": [], "eval_every": None, name: True}
    with pytest.raises(TypeError, match=rf"{name} must be an integer, but is True \(bool\)"):
        Goal(**options)
