"""A parameter server and those who ask twice: lookups and pushes are done once."""

import numpy as np
import pytest

import karvan as kv
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.store.messages import rule_to_json, spec_to_json, words
from karvan.wire import Client, RefusedError, Server

HELLO = {
    "trainer": 0,
    "trainers": 1,
    "run": "a",
    "generation": 0,
    "staleness": 1,
    "grad_reduce": "mean",
    "server": 0,
    "servers": 1,
}


@pytest.fixture
def peers():
    """Two callers in the name of one trainer."""
    with Server(ParameterServer()) as server:
        made = [Client("server", server.address, hello=HELLO) for _ in range(2)]
        made[0].call("add_table", {"spec": spec_to_json(kv.Table(2).spec("t", 0, 32))})
        yield made
        for peer in made:
            peer.close()


def pull(peer, keys, batch=1, done=()):
    message = np.zeros(words(len(keys)), np.int64)
    message[: len(keys)] = keys
    message[len(keys) :].view(np.uint32)[: len(keys)] = 1
    head = {"store": 1, "batch": batch, "tables": ["t"], "counts": [len(keys)], "training": True}
    head |= {"step": batch, "now": 0.0, "wire": "float32", "done": list(done)}
    return peer.call("pull", head, [message]).arrays[0].reshape(-1, 2)


def push(peer, gradients, batches=(1,), sequence=1, **more):
    rule = kv.store.Rule("sgd")
    rule.lr = 1.0
    head = {"store": 1, "sequence": sequence, "batches": list(batches), "rules": {"t": rule_to_json(rule)}}
    head |= {"steps": {"t": sequence}, "skipped": [], "complete": True, "wire": "float32", "done": []}
    peer.call("push", {**head, **more}, [np.asarray(each, np.float32).reshape(-1) for each in gradients])


def rows(peer):
    keys, vectors, _, counts, _ = peer.call("snapshot", {"table": "t", "part": 0, "parts": 1}).arrays
    return {int(key): (vector, int(count)) for key, vector, count in zip(keys, vectors, counts, strict=True)}


def test_a_lookup_that_another_caller_repeats_is_answered_as_before(peers):
    first = pull(peers[0], [3, 4])
    push(peers[0], [[[1, 1], [1, 1]]])
    assert np.array_equal(pull(peers[1], [3, 4]), first)
    assert [count for _, count in rows(peers[0]).values()] == [1, 1]


def test_a_lookup_is_not_repeated_with_other_keys(peers):
    pull(peers[0], [3, 4])
    with pytest.raises(RefusedError, match="the same keys as in the batch's lookup"):
        pull(peers[1], [3, 5])


def test_a_lookup_that_comes_after_its_end_is_refused(peers):
    pull(peers[0], [3])
    pull(peers[0], [4], batch=2, done=[1])
    with pytest.raises(RefusedError, match="is not done with, got 1"):
        pull(peers[1], [3])
    assert [count for _, count in rows(peers[0]).values()] == [1, 1]


def test_a_push_that_another_caller_repeats_is_applied_once(peers):
    before = pull(peers[0], [3, 4])
    for peer in (*peers, peers[0]):
        push(peer, [[[1, 2], [3, 4]]])
    found = rows(peers[0])
    assert np.array_equal(found[3][0], before[0] - np.float32([1, 2]))
    assert np.array_equal(found[4][0], before[1] - np.float32([3, 4]))
    push(peers[1], [[[1, 1], [1, 1]]], sequence=2)
    assert np.allclose(rows(peers[0])[3][0], before[0] - np.float32([2, 3]))


def test_passes_of_a_push_may_come_from_several_callers_and_are_applied_with_the_last(peers):
    before = pull(peers[0], [3])
    pull(peers[1], [3], batch=2)
    push(peers[1], [[[10, 20]]], batches=(1, 2), mine=[1])
    push(peers[1], [[[10, 20]]], batches=(1, 2), mine=[1])
    assert np.array_equal(rows(peers[0])[3][0], before[0])
    pull(peers[1], [5], batch=3, done=[2])  # the pass that has come does not need its lookup any more
    push(peers[0], [[[1, 2]]], batches=(1, 2), mine=[0])
    push(peers[1], [[[10, 20]]], batches=(1, 2), mine=[1])
    assert np.allclose(rows(peers[0])[3][0], before[0] - np.float32([11, 22]))


def test_pushes_that_are_wrong_are_refused(peers):
    pull(peers[0], [3])
    with pytest.raises(RefusedError, match="batches that were looked up"):
        push(peers[0], [[[1, 2]]], batches=(9,))
    with pytest.raises(RefusedError, match="one of 1 passes, got number 1"):
        push(peers[0], [[[1, 2]]], mine=[1])
    with pytest.raises(RefusedError, match=r"expected gradients\[0\] to be float32 \[2\], got float32 \[3\]"):
        push(peers[0], [[[1, 2, 3]]])
    with pytest.raises(RefusedError, match="gradients of some batches, got none"):
        push(peers[0], [], mine=[])
    push(peers[0], [[[0, 0]]], sequence=1000)
    with pytest.raises(RefusedError, match="newest pushes, got 1"):
        push(peers[0], [[[1, 2]]])
