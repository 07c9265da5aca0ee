"""How far lookups run ahead, against a list: never beyond the bound, in order, and nobody waits for ever."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from karvan.store import LookupContext
from karvan.store.remote.staleness_window import Countdown, PendingLookup, StalenessWindow


class Lookup(PendingLookup):
    """Notes that it has begun."""

    def __init__(self, name, begun):
        super().__init__(None, LookupContext(training=True))
        self.name, self._order = name, begun

    def _ask(self):
        self._order.append(self.name)

    def ready(self):
        return False, 0.0

    def finish(self):
        pass


ACTION = st.one_of(
    st.just(("offer",)),
    st.just(("offer",)),
    st.tuples(st.just("send"), st.integers(1, 3)),
    st.tuples(st.just("acknowledge"), st.integers(1, 3)),
    st.just(("drop",)),
    st.just(("late",)),
    st.tuples(st.just("early"), st.integers(1, 20)),
)


@given(st.integers(1, 5), st.lists(ACTION, max_size=60))
@example(
    3, [("offer",)] * 6 + [("drop",), ("late",), ("send", 3), ("acknowledge", 3), ("early", 9), ("offer",)]
)
def test_lookups_ahead_begin_in_order_and_never_more_than_the_bound(bound, actions):
    window, order = StalenessWindow(bound), []
    lookups = []  # all that were offered and are still held, in order
    sent, ended = [], []  # numbers
    offered = 0
    dropped = set()  # names of those that nobody held when their turn came
    most = total = 0
    for action, *number in actions:
        before = len(order)
        flight = [each for each in lookups if each.started and each.number not in ended]
        unsent = [each.number for each in flight if each.number not in sent]
        if action == "offer":
            lookups.append(Lookup(offered, order))
            offered += 1
            window.offer(lookups[-1])
        elif action == "send":
            sent += unsent[: number[0]]
            window.sent(unsent[: number[0]])
        elif action == "acknowledge":
            ending = [each for each in sent if each not in ended][: number[0]]
            ended += ending
            window.end(ending)
        elif action == "drop":
            waiting = [each for each in lookups if not each.started]
            if waiting:
                dropped.add(waiting[0].name)
                lookups.remove(waiting.pop(0))
        elif action == "late":
            window.used(waited=True, spare=0.0)
        else:
            for _ in range(number[0]):
                window.used(waited=False, spare=2.0)
        out = len([each for each in lookups if each.started and each.number not in ended])
        assert out <= bound
        for more in range(len(order) - before):
            count = out - (len(order) - before) + more + 1
            most, total = max(most, count), total + count
        assert (window.lookups, window.most, window.total) == (len(order), most, total)
        # In the order in which they were offered; none that was not dropped is passed over.
        assert order == sorted(order)
        assert set(range(order[-1] + 1 if order else 0)) - set(order) <= dropped
        # At least two at once, or as many as the bound allows, unless nobody offers more.
        waiting = [each for each in lookups if not each.started]
        assert not waiting or action == "early" or out >= min(2, bound)
    # Everything that is still held begins, once what is in flight is acknowledged.
    for _ in range(len(lookups) + 1):
        flight = [each.number for each in lookups if each.started and each.number not in ended]
        window.sent(flight)
        window.end(flight)
        ended += flight
    assert all(each.started for each in lookups)
    window.drain()  # does not wait


@given(st.integers(1, 4), st.integers(0, 4))
def test_a_lookup_that_is_needed_waits_only_for_gradients_that_were_sent(bound, in_flight):
    window, order = StalenessWindow(bound), []
    held = [Lookup(name, order) for name in range(in_flight)]
    for each in held:
        window.need(each)  # none of these was sent, so each begins even beyond the bound
    assert order == list(range(in_flight))
    needed = Lookup(in_flight, order)
    window.sent([each.number for each in held])
    full = in_flight >= bound
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(window.need, needed)
        if full:
            with pytest.raises(TimeoutError):
                waiting.result(0.02)
            assert not needed.started
        for each in held:
            window.end([each.number])
        waiting.result(30)
    assert needed.started
    assert needed.number == in_flight + 1


def test_a_lookup_that_nobody_holds_leaves_room_unless_its_gradient_was_sent():
    window, order = StalenessWindow(1), []
    first, second, third = (Lookup(name, order) for name in range(3))
    window.offer(first)
    window.give_up(first.number)
    window.offer(second)
    assert order == [0, 1]
    window.sent([second.number])
    window.give_up(second.number)
    window.offer(third)
    assert order == [0, 1]  # the gradient of the second is still on its way
    window.end([second.number])
    assert order == [0, 1, 2]


def test_a_failure_reaches_who_waits_and_who_asks_next():
    window, order = StalenessWindow(1), []
    first, second, third = (Lookup(name, order) for name in range(3))
    window.need(first)
    window.sent([first.number])
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(window.need, second), threads.submit(window.drain)]
        window.fail(OSError("gone"))
        window.fail(OSError("a second one"))
        for each in waiting:
            with pytest.raises(OSError, match=r"^gone$"):
                each.result(30)
    with pytest.raises(OSError, match=r"^gone$"):
        window.need(third)
    window.offer(third)
    assert order == [0]


@given(st.integers(1, 6), st.booleans())
def test_a_countdown_is_done_once_by_the_last_of_its_calls(calls, fails):
    done, failed = [], []
    countdown = Countdown(calls, lambda: done.append(threading.get_ident()), failed.append)
    error = OSError("no answer")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(countdown.one, [error if fails else None] + [None] * (calls - 1)))
    assert len(done) == (0 if fails else 1)
    assert failed == ([error] if fails else [])
