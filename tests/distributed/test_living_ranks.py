"""Ranks that call one function after the other are what new processes are."""

import pytest
from processes import is_alive
from ranks_helpers import Rank, run
from wire_helpers import wait_for

AS_NEW = {"environment": None, "folder": "distributed", "threads": 1}


def pids(found):
    return [each["pid"] for each in found]


def test_calls_find_in_the_same_processes_nothing_of_those_before():
    first, *others = [run(world, "living_programs:leave") for world in (2, 1, 2)]
    for found in (first, *others):
        world = (1, False, str(len(found)))
        assert all(each == each | AS_NEW | {"world": world, "random": first[0]["random"]} for each in found)
        assert pids(found) == pids(first)[: len(found)]


@pytest.mark.parametrize("what", ["a thread", "a signal handler"])
def test_a_rank_that_is_not_what_it_was_is_replaced(what):
    before = run(2, "living_programs:leave", what=what)
    assert not {*pids(before)} & {*pids(run(2, "living_programs:leave"))}
    wait_for(lambda: not any(map(is_alive, pids(before))))


@pytest.mark.parametrize("how", ["fails", "is killed", "waits"])
def test_after_a_failure_or_a_timeout_all_ranks_are_replaced(how):
    before = run(3, "living_programs:leave")
    with pytest.raises(AssertionError, match=None if how == "waits" else "Rank 1"):
        run(3, "living_programs:fail", timeout=1 if how == "waits" else 30, victim=1, how=how)
    wait_for(lambda: not any(map(is_alive, pids(before))))
    assert not {*pids(before)} & {*pids(run(3, "living_programs:leave"))}


def test_a_rank_ends_when_nobody_can_call_it_any_more():
    """As when pytest is killed: its end of the pipe is closed."""
    rank = Rank()
    assert rank.is_new()
    rank.calls.close()
    rank.process.join(60)
    assert rank.process.exitcode == 0
