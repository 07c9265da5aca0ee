import gc
import threading
from itertools import count

import pytest
import torch
from loader_helpers import no_threads_left

from karvan import Batch
from karvan.data.streams import Stream


def batch(number):
    return Batch({"number": torch.tensor([number])})


def numbers(batches):
    return [int(each["number"][0]) for each in batches]


class Counting:
    """Endless batches with a position."""

    def __init__(self):
        self.next = 0
        self.given = 0

    def __iter__(self):
        while True:
            self.next += 1
            self.given += 1
            yield batch(self.next - 1)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_stream_gives_all_batches_of_an_iterable_in_order():
    assert numbers(Stream(batch(i) for i in range(20))) == list(range(20))
    assert numbers(Stream([])) == []


def test_closing_ends_an_endless_stream_after_what_has_arrived():
    stream = Stream((batch(i) for i in count()), prefetch=3)
    got = [next(stream) for _ in range(5)]
    stream.close()
    got += list(stream)
    assert numbers(got) == list(range(len(got)))
    assert 5 <= len(got) <= 8
    assert no_threads_left()


def test_closing_wakes_a_caller_while_the_iterable_waits_for_data():
    arrives, asked = threading.Event(), threading.Event()

    def waiting():
        yield batch(0)
        asked.set()
        arrives.wait(60)

    stream = Stream(waiting())
    got = []
    taker = threading.Thread(target=lambda: got.extend(numbers(stream)))
    taker.start()
    assert asked.wait(60)
    stream.close()
    taker.join(timeout=60)
    assert not taker.is_alive()
    assert got == [0]
    arrives.set()
    assert no_threads_left()


def test_a_closed_stream_that_never_began_is_empty():
    stream = Stream([batch(0)])
    stream.close()
    assert list(stream) == []
    assert no_threads_left()


def test_an_error_of_the_iterable_comes_in_its_place_and_ends_the_stream():
    def failing():
        yield batch(0)
        raise LookupError("no more topics")

    stream = Stream(failing())
    assert numbers([next(stream)]) == [0]
    with pytest.raises(LookupError, match="no more topics"):
        next(stream)
    assert list(stream) == []


def test_no_more_batches_are_taken_ahead_than_asked_and_dropping_ends_the_thread():
    source = Counting()
    stream = Stream(source, prefetch=2)
    for taken in range(1, 50):
        next(stream)
        assert source.given <= taken + 3  # one is in the thread's hands
    del stream
    gc.collect()
    assert no_threads_left()


def test_the_position_is_after_the_last_batch_handed_out_whatever_was_taken_ahead():
    stream = Stream(Counting(), prefetch=8)
    assert stream.state_dict() == {"next": 0}
    assert numbers(next(stream) for _ in range(3)) == [0, 1, 2]
    state = stream.state_dict()
    assert state == {"next": 3}
    with pytest.raises(RuntimeError, match="before its first batch"):
        stream.load_state_dict(state)
    other = Stream(Counting())
    other.load_state_dict(state)
    assert numbers([next(other)]) == [3]


def test_an_iterable_without_a_position_says_so():
    with pytest.raises(TypeError, match="needs state_dict\\(\\) of its iterable, but list has none"):
        Stream([]).state_dict()
    with pytest.raises(ValueError, match="prefetch must be at least 1, but is 0"):
        Stream([], prefetch=0)
