"""`len(loader)`, `batches_left` and `repr(loader)`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import TableSource, decode

from karvan.data.loading.loader import Loader


@given(
    size=st.integers(0, 90),
    batch_size=st.integers(1, 20),
    epochs=st.integers(1, 3),
    drop=st.booleans(),
    world=st.integers(1, 4),
    shuffle=st.sampled_from([0, 7, 1000]),
)
def test_the_len_is_the_number_of_batches_of_each_iteration(size, batch_size, epochs, drop, world, shuffle):
    for rank in range(world):
        loader = Loader(
            TableSource([size, 3]),
            decode,
            batch_size,
            epochs=epochs,
            drop_remainder=drop,
            shuffle=shuffle,
            rank=rank,
            world_size=world,
        )
        assert len(loader) == loader.batches_left == len(list(loader))
        assert loader.batches_left == 0
        assert len(list(loader)) == len(loader)


def test_steps_per_epoch_are_the_len_of_an_epoch():
    loader = Loader(TableSource([20]), decode, 4, epochs=3, steps_per_epoch=7)
    assert len(loader) == loader.batches_left == len(list(loader)) == 21
    assert loader.batches_left == 0


def test_endless_data_has_no_len_and_says_so():
    for steps_per_epoch in (None, 5):
        loader = Loader(TableSource([20]), decode, 4, epochs=None, steps_per_epoch=steps_per_epoch)
        with pytest.raises(TypeError, match=r"epochs=None gives batches without end, so it has no len\(\)"):
            len(loader)
        assert loader.batches_left is None
        assert "endless" in repr(loader)


def test_a_loader_is_true_even_if_it_gives_no_batch_or_has_no_len():
    assert Loader(TableSource([0]), decode, 4)
    assert Loader(TableSource([9]), decode, 4, epochs=None)


def test_the_len_does_not_depend_on_the_position_and_the_batches_left_do():
    loader = Loader(TableSource([100]), decode, 8, epochs=2, rank=1, world_size=2)
    iterator = iter(loader)
    for _ in range(9):
        next(iterator)
    resumed = Loader(TableSource([100]), decode, 8, epochs=2, rank=1, world_size=2)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == len(loader) == 14
    assert resumed.batches_left == loader.batches_left == len(list(resumed)) == 5


def test_a_loader_shows_what_it_reads_and_where_it_is():
    loader = Loader(TableSource([100, 50]), decode, 8, shuffle=30, rank=1, world_size=2)
    next(iter(loader))
    assert repr(loader) == (
        "Loader(TableSource, 150 records, parts=2, batch_size=8, shuffle=30, 10 batches, rank 1 of 2, "
        "at epoch 0, 8 of 75 records)"
    )
