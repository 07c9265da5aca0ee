"""Stop anywhere, go on with any number of ranks: every record of every epoch comes exactly once."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import TableSource, decode, records_of

from karvan.data.loading.loader import Loader
from karvan.data.loading.rank_shares import merge

worlds = st.integers(1, 4)
settings_of_data = {
    "sizes": st.lists(st.integers(0, 40), min_size=1, max_size=4),
    "shuffle": st.sampled_from([0, 1, 10, 1000]),
    "split_records": st.sampled_from([1, 3, 8, 50, None]),
    "epochs": st.integers(1, 3),
    "seed": st.integers(0, 5),
}


def take(loader, batches):
    """So many batches of a new iteration, which is then left."""
    taken = []
    iterator = iter(loader)
    for _ in range(batches):
        batch = next(iterator, None)
        if batch is None:
            break
        taken.append(batch)
    return taken


@given(
    **settings_of_data,
    batch_size=st.integers(1, 13),
    stops=st.lists(
        st.tuples(worlds, st.lists(st.integers(0, 12), min_size=4, max_size=4), st.integers(1, 3)), max_size=3
    ),
    last_world=worlds,
)
def test_every_record_comes_exactly_once_whatever_the_stops_and_worlds(
    sizes, shuffle, split_records, epochs, seed, batch_size, stops, last_world
):
    source = TableSource(sizes)
    common = {"shuffle": shuffle, "split_records": split_records, "epochs": epochs, "seed": seed}
    got, position = Counter(), None
    for world, batches_of_rank, workers in [*stops, (last_world, [10**6] * 4, 2)]:
        states = []
        for rank in range(world):
            loader = Loader(
                source, decode, batch_size, rank=rank, world_size=world, workers=workers, prefetch=2, **common
            )
            if position is not None:
                loader.load_state_dict(position)
            got.update(records_of(take(loader, batches_of_rank[rank])))
            states.append(json.loads(json.dumps(loader.state_dict())))
        position = merge(states)
    assert got == Counter(dict.fromkeys(range(source.total), epochs))


@given(**settings_of_data, batch_size=st.integers(1, 13), stop=st.integers(0, 30), world=worlds)
def test_the_same_number_of_ranks_goes_on_with_the_very_batches_that_would_have_come(
    sizes, shuffle, split_records, epochs, seed, batch_size, stop, world
):
    source = TableSource(sizes)
    common = {"shuffle": shuffle, "split_records": split_records, "epochs": epochs, "seed": seed}

    def loader(rank):
        return Loader(source, decode, batch_size, rank=rank, world_size=world, **common)

    first = [loader(rank) for rank in range(world)]
    began = [[batch["record"].tolist() for batch in take(each, stop)] for each in first]
    states = [each.state_dict() for each in first]
    merged = merge(states)
    for rank in range(world):
        whole = [batch["record"].tolist() for batch in loader(rank)]
        for state in (states[rank], merged):
            second = loader(rank)
            second.load_state_dict(state)
            assert began[rank] + [batch["record"].tolist() for batch in second] == whole


@given(**settings_of_data, world=worlds, drop=st.booleans(), batch_size=st.integers(1, 13))
def test_workers_and_prefetch_change_nothing_in_the_batches(
    sizes, shuffle, split_records, epochs, seed, world, drop, batch_size
):
    source = TableSource(sizes)
    common = {"shuffle": shuffle, "split_records": split_records, "epochs": epochs, "seed": seed}
    results = [
        [
            batch["record"].tolist()
            for batch in Loader(
                source,
                decode,
                batch_size,
                rank=world - 1,
                world_size=world,
                workers=workers,
                prefetch=prefetch,
                drop_remainder=drop,
                **common,
            )
        ]
        for workers, prefetch in ((1, 1), (3, 2), (2, 9))
    ]
    assert results[0] == results[1] == results[2]
    if drop:
        assert all(len(batch) == batch_size for batch in results[0])


@given(
    stop=st.integers(0, 15), world=worlds, second_world=worlds, shuffle=st.sampled_from([0, 10]), extra=worlds
)
def test_with_endless_epochs_no_record_comes_a_second_time_before_the_epoch_is_over(
    stop, world, second_world, shuffle, extra
):
    source = TableSource([40])
    common = {"shuffle": shuffle, "split_records": 4, "epochs": None}
    first = [Loader(source, decode, 5, rank=rank, world_size=world, **common) for rank in range(world)]
    got = Counter(record for each in first for record in records_of(take(each, stop)))
    merged = merge(each.state_dict() for each in first)
    final = 0
    for rank in range(second_world):
        loader = Loader(source, decode, 5, rank=rank, world_size=second_world, **common)
        loader.load_state_dict(merged)
        for batch in loader:
            if loader.epoch >= 16 + extra:
                break
            got.update(batch["record"].tolist())
            final = max(final, loader.epoch)
    assert set(got) == set(range(40))
    assert set(got.values()) == {final + 1}
