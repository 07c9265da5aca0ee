"""What ranks do together, with threads in the place of ranks."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from karvan.checkpoint import CheckpointError
from karvan.checkpoint.errors import together
from karvan.distributed import CollectiveChannel
from karvan.distributed.collectives import RankHeartbeats


class ThreadLane(CollectiveChannel):
    """A channel whose ranks are threads."""

    def __init__(self, rank, values, barrier):
        super().__init__("test")
        self.rank, self.world_size = rank, len(values)
        self._values, self._barrier = values, barrier

    def gather(self, data):
        self.operations += 1
        self._barrier.wait(20)
        self._values[self.rank] = data
        self._barrier.wait(20)
        return list(self._values)

    def sum(self, values):
        return torch.tensor([sum(json.loads(one) for one in self.gather(json.dumps(values.item()).encode()))])


def on_ranks(world, work):
    """What `work(channel)` returned or raised on each."""
    values, barrier = [None] * world, threading.Barrier(world)
    channels = [ThreadLane(rank, values, barrier) for rank in range(world)]

    def run(channel):
        try:
            return work(channel)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, channels)), channels


def test_all_get_what_each_has_said():
    results, _ = on_ranks(3, lambda channel: together(channel, "x", lambda: channel.rank * 2))
    assert results == [[0, 2, 4]] * 3


@pytest.mark.parametrize(
    ("error", "name_rank", "says"),
    [
        (CheckpointError("a/b", "it broke."), True, "a/b: rank 1: it broke."),
        (CheckpointError("a/b", "it broke."), False, "a/b: it broke."),
        (CheckpointError("a/b", "rank 2: it broke."), True, "a/b: rank 2: it broke."),
        (MemoryError("much"), True, "x: rank 1: MemoryError: much"),
    ],
)
def test_an_error_of_one_is_the_same_error_on_all(error, name_rank, says):
    def fail(channel):
        if channel.rank > 0:
            raise error

    results, _ = on_ranks(
        3, lambda channel: together(channel, "x", lambda: fail(channel), name_rank=name_rank)
    )
    assert [type(result) for result in results] == [CheckpointError] * 3
    assert [str(result) for result in results] == [says] * 3
    # Only an error that nobody expected is shown with its traceback.
    causes = [None, error, error] if isinstance(error, MemoryError) else [None] * 3
    assert [result.__cause__ for result in results] == causes


def test_who_is_alone_gets_its_own_error():
    with pytest.raises(KeyError):
        together(CollectiveChannel("test"), "x", lambda: {}["a"])


@pytest.mark.parametrize("timeout", [0.0, 1000.0])
def test_who_has_finished_meets_the_others_until_they_have(timeout):
    def work(channel):
        rounds = RankHeartbeats(channel, timeout)
        for _ in range(4 * channel.rank):
            rounds.still_working()
        rounds.finish()
        return channel.operations

    results, _ = on_ranks(3, work)
    assert (
        results == [1 if timeout else 9] * 3
    )  # without time between them, one for each piece of the slowest
