"""A member of a group of trainers: adds up numbers with the others, step by step, and prints what it gets.

Arguments: the master's address, the process's name, the transport, seconds between steps. It prints a line of
JSON for each step, and one for each round; it ends when a line arrives on stdin.
"""

import json
import sys
import threading
import time

import torch

from karvan.distributed.collectives import RankError
from karvan.distributed.elastic import ElasticGroup, GroupClient, ordered_sum
from karvan.distributed.wire_store import WireStore


def say(**values):
    print(json.dumps(values), flush=True)


def main(master, process, transport, pause):
    store = WireStore(master, 0, timeout=60.0)
    group = ElasticGroup(GroupClient(master, process), store, transport=transport, timeout=60.0)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    group.regroup()
    begun = True
    step = 0
    while not ended.is_set():
        try:
            if begun:
                say(round=group.round.number, members=group.round.members, rank=group.rank)
                step = max(group.channel.gather_json(step))  # joiners learn it
                begun = False
            members = group.round.members
            mine = torch.full((5,), float(group.member + 1))
            total = ordered_sum(group.channel, [mine], list(range(group.world_size)))
            regroup = any(group.channel.gather_json(group.regroup_wanted))
            assert total.tolist() == [float(sum(each + 1 for each in members))] * 5, (total, members)
            step += 1
            say(step=step, world=len(members))
            time.sleep(float(pause))
            if regroup:
                group.regroup()
                begun = True
        except RankError as error:
            say(lost=group.describe_loss(error))
            group.regroup()
            begun = True
    group.leave()
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
