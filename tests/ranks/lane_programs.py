"""What the ranks do in `test_lanes.py`."""

import os
import signal
import threading
import time

import torch

from karvan import distributed


def talk(transport):
    """All collectives, with numbers that tell who sent what."""
    connection = distributed.connect("sharded", transport=transport)
    lane = connection.main
    rank, world = lane.rank, lane.world
    given = torch.tensor([rank + 1.0, 10.0])
    result = {
        "sum": lane.sum(given),
        "kept": given,
        "gather": lane.gather(b"x" * rank + bytes([rank])),
        "nothing": lane.gather(b""),
        "json": lane.gather_json({"rank": rank}),
        "swap": lane.swap(torch.arange(2 * world).view(world, 2) + 100 * rank),
        # r elements to rank r, each with the sender's number in front.
        "exchange": lane.exchange(
            torch.tensor([10 * rank + to for to in range(world) for _ in range(to)]),
            list(range(world)),
            [rank] * world,
        ),
        "operations": lane.operations,
        "left": [] if rank else left(connection.lanes["evaluate"]),
    }
    lane.barrier()  # nobody ends while rank 0 waits for all
    return result


def left(lane):
    """What a thread hears that waits on a lane for others, who never come, until this rank leaves it."""
    heard = []

    def wait():
        try:
            lane.barrier()
        except distributed.RankError as error:
            heard.append(str(error))

    waits = threading.Thread(target=wait)
    waits.start()
    lane.leave()
    waits.join()
    wait()
    return heard


def lose(how, timeout, transport, victim=1):
    """One rank ends or stops in the middle; the others say what they hear of it, and how long it took."""
    lane = distributed.connect("sharded", timeout=timeout, transport=transport).main
    for _ in range(3):  # all have seen all others' memory
        lane.barrier()
    begin = time.monotonic()
    if lane.rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:  # it lives, but does not take part
            time.sleep(0.1)
    try:
        lane.barrier()
    except distributed.RankError as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0.0
