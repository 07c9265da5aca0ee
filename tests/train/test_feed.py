"""The feed: the batches of the data, ahead of time and otherwise unchanged."""

import threading
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import no_threads_left

from karvan.train.feed import feed


class Counted:
    """Numbers that know their position, and how far they were taken."""

    def __init__(self, total, fail_at=None):
        self.total, self.fail_at = total, fail_at
        self.at = 0
        self.ended = 0

    def __iter__(self):
        try:
            while self.at < self.total:
                if self.at == self.fail_at:
                    raise OSError("the disk is gone")
                self.at += 1
                yield self.at
        finally:
            self.ended += 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@given(
    total=st.integers(0, 12),
    prefetch=st.integers(0, 3),
    leave=st.none() | st.integers(0, 12),
    skip=st.integers(0, 3),
    fail_at=st.none() | st.integers(0, 12),
)
def test_batches_come_in_order_with_the_position_behind_them_however_they_end(
    total, prefetch, leave, skip, fail_at
):
    data = Counted(total, fail_at)
    end = total if fail_at is None else min(total, fail_at)
    fails = fail_at is not None and fail_at < total
    received = []
    error = None
    with closing(feed(data, lambda n: n * 10, prefetch=prefetch, skip=skip)) as batches:
        try:
            for fed in batches:
                assert fed.position == {"at": fed.batch // 10}
                received.append(fed.batch // 10)
                if len(received) == leave:
                    break
        except (OSError, ValueError) as raised:
            error = raised
    expected = list(range(skip + 1, end + 1))
    left = leave is not None and 0 < leave <= len(expected)
    assert received == (expected[:leave] if left else expected)
    if not left and fails:
        assert isinstance(error, OSError)
    elif not left and skip > total:
        assert "must give the" in str(error)
    else:
        assert error is None
    if left:
        assert data.at == received[-1]  # as if nothing had been taken ahead
    assert data.ended <= 1
    assert no_threads_left()


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_more_than_asked_for_are_taken_ahead(ahead):
    data = Counted(10)
    taken = threading.Semaphore(0)
    with closing(feed(data, lambda n: taken.release() or n, prefetch=ahead)) as batches:
        assert next(batches).batch == 1
        for _ in range(1 + ahead):
            assert taken.acquire(timeout=20)
        assert not taken.acquire(timeout=0.05)
        assert data.at == 1 + ahead


def test_one_who_waits_for_a_batch_is_let_go_when_asked_to_stop():
    waiting, more, stop = threading.Event(), threading.Event(), threading.Event()

    def slow():
        yield 1
        waiting.set()
        more.wait(60)
        yield 2

    def wait_and_stop():
        waiting.wait(60)
        stop.set()

    with closing(feed(slow(), prefetch=1, stopped=stop.is_set)) as batches:
        assert next(batches).batch == 1
        threading.Thread(target=wait_and_stop).start()
        threading.Timer(0.2, more.set).start()  # closing waits for the data
        assert list(batches) == []
    assert no_threads_left()


def test_the_error_of_preparing_a_batch_comes_in_its_place():
    def prepare(number):
        if number == 3:
            raise ValueError("a bad batch")
        return number

    received = []
    with pytest.raises(ValueError, match="a bad batch"):
        received += [received.append(fed.batch) for fed in feed(range(1, 9), prepare, prefetch=2)]
    assert received == [1, 2]
    assert no_threads_left()
