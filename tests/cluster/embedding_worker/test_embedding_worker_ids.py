"""The ids that an embedding worker keeps: who may send what, and what becomes of it."""

import time

import numpy as np
import pytest
import torch

from karvan.cluster.batch_messages import pack, unpack
from karvan.cluster.embedding_worker.client import WorkerClient
from karvan.cluster.embedding_worker.service import EmbeddingWorker, IdCache
from karvan.ragged import REFERENCE, Batch, IdsReference, Ragged
from karvan.wire import Client, RefusedError, Server, WireError

IDS = {"user": torch.arange(3)}


@pytest.fixture
def start():
    """start(**options) gives a client of a worker that was made so, and its address."""
    opened = []

    def begin(**options):
        server = Server(EmbeddingWorker(**options))
        opened.extend([WorkerClient(0, server.address), server])
        return opened[-2], server.address

    yield begin
    for each in opened:
        each.close()


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_ids_are_kept_once_until_they_are_forgotten(start):
    client, _ = start()
    client.put("a", IDS)
    client.put("a", IDS)
    client.put("b", {"user": Ragged.from_lists([[1], [2, 3]]), "item": torch.zeros(2, 4, dtype=torch.int64)})
    assert client.describe()["waiting"] == client.describe()["received"] == 2
    client.forget(["a", "unknown"])
    assert client.describe()["waiting"] == client.describe()["kept"] == 1


def test_batches_that_nobody_claims_expire_and_are_counted(start):
    client, _ = start(expire=0.05)
    client.put("a", IDS)
    wait_for(lambda: client.describe()["expired"] == 1)
    assert client.describe()["waiting"] == client.describe()["kept"] == 0
    client.put("a", IDS)  # it can be sent again
    assert client.describe()["received"] == 2


def test_who_claims_what_is_not_there_learns_why():
    ids = IdCache(expire=1e-9, most=1)
    assert ids.put("late", Batch(IDS))
    assert ids.claim("late") is None
    assert "nobody claimed it within 1e-09 s" in ids.why_missing("late")
    assert "never arrived" in ids.why_missing("other")


def test_what_was_claimed_in_vain_finds_room():
    ids = IdCache(expire=1000, most=1)
    assert ids.put("a", Batch(IDS))
    assert not ids.put("b", Batch(IDS))
    assert ids.claim("b") is None
    assert ids.put("b", Batch(IDS))
    assert ids.claim("b") is not None
    assert ids.waiting == 1
    ids.forget_claimed()  # of trainers that are gone
    assert ids.claim("b") is None
    assert ids.claim("a") is not None


def test_a_full_worker_has_loaders_wait(start):
    client, _ = start(most=1)
    client.put("a", IDS)
    with pytest.raises(WireError, match="worker 0 expected to have room"):
        client.put("b", IDS, within=0.05)
    client.forget(["a"])
    client.put("b", IDS)
    with pytest.raises(ValueError, match="room for 1 batch"):
        EmbeddingWorker(most=0)


def test_what_is_no_batch_of_ids_is_refused(start):
    client, address = start()
    peer = Client("worker", address)
    wrong = [
        {"user": torch.zeros(3)},
        {"user": torch.zeros(3, dtype=torch.int32)},
        {REFERENCE: IdsReference(0, "x", 3)},
    ]
    for batch in wrong:
        with pytest.raises(RefusedError, match="expected ids of 64 bits"):
            client.put("a", batch)
    with pytest.raises(ValueError, match="equal rows"):
        client.put("a", {"user": torch.arange(3), "item": torch.arange(4)})
    offsets = torch.tensor([0, 5, 2])
    with pytest.raises(ValueError, match="must not decrease"):
        client.put("a", {"user": Ragged(torch.arange(2), offsets)})
    for head in ({}, {"batch": 3}, {"batch": {"user": ["tensor", [[7, ""]]]}}):
        with pytest.raises(RefusedError):
            peer.call("put", {"reference": "a", **head}, [np.zeros(3, np.int64)])
    for name in (None, "", 7, "x" * 201):
        with pytest.raises(RefusedError, match="expected reference to be text"):
            peer.call("put", {**pack(IDS).head, "reference": name}, pack(IDS).arrays)
    with pytest.raises(RefusedError, match="expected references to be a list"):
        peer.call("forget", {"references": "a"})
    for method in ("claim", "backward", "engine"):
        with pytest.raises(RefusedError, match=f"{method}: expected the head with"):
            peer.call(method, {})
    with pytest.raises(RefusedError, match="does not know the call"):
        peer.call("dance", {})
    assert client.describe()["kept"] == 0
    peer.close()


def test_trainers_say_who_they_are(start):
    _, address = start()
    hello = {
        "run": "a",
        "generation": 0,
        "trainer": 0,
        "trainers": 1,
        "divisor": 1,
        "worker": 0,
        "servers": 1,
    }
    for said, text in (
        ({"run": "a"}, "expected the hello with 'generation'"),
        ({**hello, "worker": 3}, "asked for as worker 0, got 3"),
        ({**hello, "trainer": 7}, "a trainer from 0 to 0, got 7"),
        (hello, "got none"),
    ):
        with pytest.raises(RefusedError, match=text):
            Client("worker", address, hello=said).call("claim", {})


def test_a_reference_travels_with_the_batch():
    batch = Batch({"label": torch.rand(3), REFERENCE: IdsReference(1, "x", 3)})
    message = pack(batch)
    found = unpack(message.head["batch"], message.arrays)
    assert found.samples == 3
    assert torch.equal(found["label"], batch["label"])
    assert repr(found[REFERENCE]) == "IdsReference(worker=1, name='x', rows=3)"
    assert batch.to("cpu")[REFERENCE] is batch[REFERENCE]
    with pytest.raises(ValueError, match="equal rows"):
        Batch({"label": torch.rand(2), REFERENCE: IdsReference(1, "x", 3)})
    with pytest.raises(ValueError, match="of 0 or more"):
        IdsReference(-1, "x", 3)
