"""The arithmetic of the goodput that `benchmarks/support/goodput.py` simulates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.goodput import DAY, PUBLISHED, Costs, seconds_between, simulate

FREE = {
    "step_seconds": 1.0,
    "reform_seconds": 0.0,
    "replace_seconds": 0.0,
    "rejoin_seconds": 0.0,
    "checkpoint_seconds": 0.0,
    "checkpoint_every": math.inf,
}


def run(workers=1, failing=math.inf, seconds=1000.0, seed=0, **costs):
    return simulate(
        Costs(**FREE | costs), workers=workers, mean_between_failures=failing, seconds=seconds, seed=seed
    )


@pytest.mark.parametrize("workers", [1, 7, 1000])
def test_without_failures_and_checkpoints_all_seconds_are_useful(workers):
    found = run(workers)
    assert (found.goodput, found.failures, found.checkpoints) == (1.0, 0, 0)
    assert found.available == 1000.0 * workers


def test_a_checkpoint_comes_at_the_end_of_a_step_and_all_wait_for_it():
    # Of every 12 + 2 seconds, in which 4 steps of 3 seconds reach the 10 that are due, 12 are useful.
    found = run(5, seconds=1400.0, step_seconds=3.0, checkpoint_every=10.0, checkpoint_seconds=2.0)
    assert found.goodput == pytest.approx(12 / 14)
    assert found.checkpoints == 100


@pytest.mark.parametrize(("replace", "rejoin"), [(0.0, 0.0), (40.0, 0.0), (0.0, 15.0), (40.0, 15.0)])
@pytest.mark.parametrize("step", [0.5, 20.0])
def test_one_worker_has_the_goodput_of_a_closed_form(step, replace, rejoin):
    failing = 100.0
    found = run(
        failing=failing,
        seconds=2_000_000.0,
        step_seconds=step,
        replace_seconds=replace,
        rejoin_seconds=rejoin,
        reform_seconds=1e9,  # there is nobody who would wait for it
    )
    # A life is exponential; of what is left of it after the rejoin, whole steps count.
    whole_steps = math.exp(-rejoin / failing) * step / math.expm1(step / failing)
    assert found.goodput == pytest.approx(whole_steps / (failing + replace), rel=0.03)
    assert found.failures == pytest.approx(2_000_000.0 / (failing + replace), rel=0.03)


def test_many_workers_that_seldom_fail_lose_the_sum_of_all_waits():
    failing, workers = 1_000_000.0, 500  # one of them every 2000 seconds
    waits = {"reform_seconds": 3.0, "rejoin_seconds": 2.0, "replace_seconds": 10.0}
    found = run(workers, failing, 20_000_000.0, step_seconds=2.0, **waits)
    lost = (
        3.0 + 2.0 + 1.0 + (10.0 + 2.0) / workers
    )  # and half a step; the dead one's place is empty for longer
    assert 1 - found.goodput == pytest.approx(lost / 2000.0, rel=0.05)


def test_a_death_while_all_wait_makes_the_wait_longer_and_loses_no_step():
    # With waits that never end before the next death, no step is ever made but those before the first one.
    found = run(100, failing=1000.0, seconds=100_000.0, reform_seconds=1e9)
    assert found.useful <= 100 * 200
    assert found.failures > 1000


@given(
    seed=st.integers(0, 1000),
    workers=st.integers(1, 40),
    failing=st.floats(5.0, 10_000.0),
    step=st.floats(0.1, 30.0),
    waits=st.lists(st.floats(0.0, 50.0), min_size=4, max_size=4),
    every=st.floats(1.0, 500.0),
)
def test_goodput_is_a_share_and_the_same_for_the_same_seed(seed, workers, failing, step, waits, every):
    names = ("reform_seconds", "replace_seconds", "rejoin_seconds", "checkpoint_seconds")
    costs = dict(zip(names, waits, strict=True)) | {"step_seconds": step, "checkpoint_every": every}
    found = run(workers, failing, 2000.0, seed, **costs)
    assert -1e-9 <= found.goodput <= 1 + 1e-9
    assert found == run(workers, failing, 2000.0, seed, **costs)


def test_more_failures_and_dearer_ones_cost_more():
    costs = {"reform_seconds": 3.0, "rejoin_seconds": 3.0, "replace_seconds": 10.0}
    by_rate = [run(100, failing, 1e6, **costs).goodput for failing in (1e5, 1e6, 1e7)]
    assert by_rate == sorted(by_rate)
    by_cost = [run(100, 1e5, 1e6, reform_seconds=seconds).goodput for seconds in (100.0, 10.0, 1.0)]
    assert by_cost == sorted(by_cost)


def test_rates_are_seconds_between_failures_of_one_worker():
    assert math.exp(-DAY / seconds_between(0.15, DAY)) == pytest.approx(0.85)
    order = ["preemptible, 15 % a day", "preemptible, 5 % a day", "spot, 20 % a month", "spot, 5 % a month"]
    assert sorted(PUBLISHED, key=PUBLISHED.get) == [*order, "GPU failures"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_seconds": 0.0},
        {"reform_seconds": -1.0},
        {"checkpoint_every": 0.0},
        {"rejoin_seconds": math.nan},
    ],
)
def test_costs_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Costs(**FREE | wrong)


def test_every_cost_must_be_measured():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'reform_seconds'"):
        Costs(**{name: value for name, value in FREE.items() if name != "reform_seconds"})
    with pytest.raises(ValueError, match="at least one worker"):
        run(0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        seconds_between(1.0, DAY)
