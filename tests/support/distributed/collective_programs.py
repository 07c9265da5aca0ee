"""What the ranks do in `test_collectives.py`."""

import os
import signal
import threading
import time

import torch

from karvan import distributed


def talk(transport):
    """All collectives, with numbers that tell who sent what."""
    connection = distributed.connect("sharded", transport=transport)
    channel = connection.main
    rank, world = channel.rank, channel.world_size
    given = torch.tensor([rank + 1.0, 10.0])
    result = {
        "sum": channel.sum(given),
        "kept": given,
        "gather": channel.gather(b"x" * rank + bytes([rank])),
        "nothing": channel.gather(b""),
        "json": channel.gather_json({"rank": rank}),
        "swap": channel.swap(torch.arange(2 * world).view(world, 2) + 100 * rank),
        # r elements to rank r, each with the sender's number in front.
        "exchange": channel.exchange(
            torch.tensor([10 * rank + to for to in range(world) for _ in range(to)]),
            list(range(world)),
            [rank] * world,
        ),
        "operations": channel.operations,
        "left": [] if rank else left(connection.channels["evaluate"]),
    }
    channel.barrier()  # nobody ends while rank 0 waits for all
    return result


def left(channel):
    """What a thread hears that waits on a channel for others, who never come, until this rank leaves it."""
    heard = []

    def wait():
        try:
            channel.barrier()
        except distributed.RankError as error:
            heard.append(str(error))

    waits = threading.Thread(target=wait)
    waits.start()
    channel.leave()
    waits.join()
    wait()
    return heard


def lose(how, timeout, transport, victim=1):
    """One rank ends or stops in the middle; the others say what they hear of it, and how long it took."""
    channel = distributed.connect("sharded", timeout=timeout, transport=transport).main
    for _ in range(3):  # all have seen all others' memory
        channel.barrier()
    begin = time.monotonic()
    if channel.rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:  # it lives, but does not take part
            time.sleep(0.1)
    try:
        channel.barrier()
    except distributed.RankError as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0.0


def add_in_order(transport):
    """Sums of parts that ranks have in several ways, and the same by a plain loop."""
    import random

    from karvan.distributed.elastic import ordered_sum

    connection = distributed.connect("sharded", transport=transport)
    results = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        order = random.Random(seed)
        size = order.choice([0, 1, 2, 5, 1000])
        parts = [torch.randn(size, generator=generator) for _ in range(order.randint(1, 7))]
        ranks = [order.randrange(connection.world_size) for _ in parts]
        mine = [part for part, rank in zip(parts, ranks, strict=True) if rank == connection.rank]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        results.append((ordered_sum(connection.main, mine, ranks), expected))
    return results
