"""Tasks of a data set: they tile it, in an order that depends on seed and epoch alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from karvan.work.task import TaskKind, TaskPlan, permuted


def ranges(plan, epoch=0):
    tasks = [plan.task(epoch, index) for index in range(len(plan))]
    return [(task.path, task.first, task.records) for task in tasks]


def test_elasticdl_1_tasks_tile_every_file_and_the_last_is_shorter():
    plan = TaskPlan([("f1", 10), ("f2", 10)], 3)
    expected = [(path, first, min(3, 10 - first)) for path in ("f1", "f2") for first in (0, 3, 6, 9)]
    assert ranges(plan) == expected


def test_elasticdl_2_ten_records_in_shards_of_three():
    assert [each[1:] for each in ranges(TaskPlan([("f", 10)], 3))] == [(0, 3), (3, 3), (6, 3), (9, 1)]


@given(
    st.lists(st.integers(0, 40), max_size=8), st.integers(1, 15), st.none() | st.integers(), st.integers(0, 5)
)
def test_every_record_is_in_exactly_one_task(counts, size, seed, epoch):
    parts = [(f"part {number}", count) for number, count in enumerate(counts)]
    plan = TaskPlan(parts, size, seed=seed)
    seen = [(path, first + i) for path, first, count in ranges(plan, epoch) for i in range(count)]
    assert sorted(seen) == sorted((path, i) for path, records in parts for i in range(records))
    assert all(1 <= count <= size for _, _, count in ranges(plan, epoch))
    if seed is None:
        assert ranges(plan, epoch) == sorted(ranges(plan, epoch))


@given(st.integers(1, 3000), st.lists(st.integers(), max_size=3))
def test_a_permutation_has_every_number_once(count, seeds):
    assert sorted(permuted(index, count, *seeds) for index in range(count)) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own_that_never_change():
    parts = [("f", 1000)]
    one, same, other = (TaskPlan(parts, 10, seed=seed) for seed in (1, 1, 2))
    assert ranges(one) == ranges(same)
    assert ranges(one) != ranges(other)
    assert ranges(one) != ranges(one, epoch=1)
    # Positions in ledgers and checkpoints depend on this order.
    assert [permuted(index, 10, 7, 0) for index in range(10)] == [4, 8, 1, 0, 5, 3, 2, 9, 7, 6]


def test_a_plan_of_a_hundred_million_tasks_takes_no_memory_and_no_time():
    plan = TaskPlan([("huge", 10**12)], 10_000, seed=3)
    assert len(plan) == 10**8
    tasks = [plan.task(0, index, TaskKind.TRAIN) for index in (0, 5 * 10**7, 10**8 - 1)]
    assert len({task.number for task in tasks}) == 3
    assert all(task.first == task.number * 10_000 for task in tasks)


def test_a_task_without_records_is_an_error():
    with pytest.raises(ValueError, match="records_per_task is 0"):
        TaskPlan([("f", 10)], 0)
