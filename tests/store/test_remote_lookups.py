"""The states of lookups on parameter servers, without a server that answers."""

from hypothesis import given
from hypothesis import strategies as st

from karvan.discovery.directory import StaticDirectory
from karvan.distributed.parameter_servers import Servers
from karvan.store.remote.staleness_window import LookupsInFlight
from karvan.wire import Security


def lookups():
    """Of a job without servers: states change, and nothing is sent."""
    return LookupsInFlight(Servers(StaticDirectory({}), 0, Security(), {}, 1.0), 1, 4)


def test_a_lookup_that_was_used_is_named_by_a_capture_until_its_push():
    known = lookups()
    for number in (1, 2, 3):
        known.add(number)
    known.use(2)
    known.use(1)
    assert known.push([2]) == 1
    assert known.take_used() == [1]
    assert known.take_used() == []
    assert known.push([3]) == known.sequence == 2


def test_a_lookup_that_was_used_is_done_when_nobody_holds_it():
    known = lookups()
    known.add(1)
    known.use(1)
    known.drop(None, 1)
    known.add(2)
    known.use(2)
    known.drop(3, 2)
    assert known.send_withdrawn() == []
    assert known.take_done(None) == [1]
    assert known.take_done(3) == [2]
    assert known.take_done(None) == known.take_done(3) == []


def test_a_lookup_that_nobody_used_is_withdrawn_and_not_done():
    known = lookups()
    known.add(1)
    known.drop(5, 1)
    assert known.take_done(5) == known.take_done(None) == []
    assert known.take_used() == []


def test_uses_of_engines_without_gradients_do_not_pile_up():
    known = lookups()
    for number in range(1, 10_000):
        known.add(number)
        known.use(number)
    named = known.take_used()
    assert named[-1] == 9999
    assert named == list(range(named[0], 10_000))
    assert 2048 <= len(named) <= 4096


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "push", "drop"]), st.integers(1, 6)), max_size=40))
def test_every_dropped_lookup_is_either_withdrawn_or_done(calls):
    known = lookups()
    state = dict.fromkeys(range(1, 7), "none")
    done, used = [], set()
    for call, number in calls:
        if call == "add" and state[number] == "none":
            known.add(number)
            state[number] = "ahead"
        elif call == "use" and state[number] == "ahead":
            known.use(number)
            used.add(number)
            state[number] = "used"
        elif call == "push" and state[number] == "used":
            known.push([number])
            used.discard(number)
        elif call == "drop" and state[number] in ("ahead", "used"):
            known.drop(None, number)
            if state[number] == "used":
                done.append(number)
            state[number] = "dropped"
    assert known.take_done(None) == done
    assert known.take_used() == sorted(used)
