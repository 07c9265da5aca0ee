"""Ranks that meet at a store where earlier ones have left their traces."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from karvan.distributed.collectives import agree_on_name


def met(store, world):
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: agree_on_name(store, rank, world, 20.0), range(world)))


def test_every_generation_gets_a_name_of_its_own_whatever_was_left():
    store = dist.HashStore()
    names = []
    for world in (3, 3, 2, 4, 1, 3):
        found = met(store, world)
        assert len(set(found)) == 1
        names.append(found[0])
    assert len(set(names)) == len(names)


def test_a_rank_that_died_before_it_met_the_others_does_not_matter():
    store = dist.HashStore()
    store.set("karvan/hello/1", "of a process that is gone")
    store.set("karvan/hello/2", "of another one")
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(agree_on_name, store, 0, 3, 20.0)  # it calls the dead ones first
        while not store.check(["karvan/roll"]):
            pass
        others = [pool.submit(agree_on_name, store, rank, 3, 20.0) for rank in (2, 1)]
        assert len({each.result() for each in (first, *others)}) == 1


def test_one_who_waits_in_vain_is_told():
    with pytest.raises(TimeoutError, match=r"Rank 0 expected all 2 ranks to join within 0\.2 seconds"):
        agree_on_name(dist.HashStore(), 0, 2, 0.2)
