"""Ids on their way to embedding workers, and what is kept of them."""

import threading

import pytest
import torch

import karvan as kv
from karvan.cluster.loader.epoch_service import EpochService, serve
from karvan.cluster.loader.service import BatchName, SentIds
from karvan.ragged import REFERENCE
from karvan.wire import RefusedError, Server


class Worker:
    """Takes ids, in this process."""

    def __init__(self):
        self.had = []

    def put(self, reference, ids):
        self.had.append((BatchName.named(reference), {name: entry.tolist() for name, entry in ids.items()}))


def batch():
    return kv.Batch({"user": torch.tensor([4, 5]), "price": torch.tensor([0.5, 1.0])})


def test_ids_go_to_the_worker_of_the_number_and_the_rest_to_the_trainer():
    workers = [Worker(), Worker()]
    sent = SentIds(workers)
    rest, worker = sent.put(BatchName(0, 0, 3), 0, batch(), ["user"])
    assert (list(rest), worker) == (["price"], 1)
    assert workers[1].had == [((0, 0, 3), {"user": [4, 5]})]
    assert workers[0].had == []


def test_ids_can_be_sent_again_until_their_trainer_is_done():
    workers = [Worker(), Worker()]
    sent = SentIds(workers)
    references = [BatchName(0, 0, number) for number in range(4)]
    for reference in references:
        sent.put(reference, reference.number % 2, batch(), ["user"])
    sent.resend(references[0], 1)
    assert [reference.number for reference, _ in workers[1].had] == [1, 3, 0]
    sent.done(0, references[:2])  # 1 is another trainer's
    assert len(sent) == 3
    with pytest.raises(RefusedError, match="not done with"):
        sent.resend(references[0], 0)
    with pytest.raises(RefusedError, match="from 0 to 1, got 2"):
        sent.resend(references[1], 2)
    sent.forget(1)
    assert len(sent) == 1
    sent.forget()
    assert len(sent) == 0


def test_without_workers_or_names_a_batch_stays_whole():
    whole = batch()
    assert SentIds([]).put(BatchName(0, 0, 0), 0, whole, ["user"]) == (whole, None)
    assert SentIds([Worker()]).put(BatchName(0, 0, 0), 0, whole, []) == (whole, None)


def test_a_batch_without_an_id_feature_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="'item' that trainers look up, got: user, price"):
        SentIds([Worker()]).put(BatchName(0, 0, 0), 0, batch(), ["item"])


def test_a_stream_gets_references_and_has_ids_sent_again():
    workers = [Worker()]
    service = EpochService(workers=workers)
    reading = threading.Thread(target=serve, args=(service, [batch()] * 3), daemon=True)
    reading.start()
    with Server(service) as server:
        one = kv.data.from_loaders(loaders=[server.address], ids=["user"])
        batches = list(one)
        assert [(each.samples, list(each), each[REFERENCE].worker) for each in batches] == [
            (2, ["price", REFERENCE], 0)
        ] * 3
        names = [BatchName.named(each[REFERENCE].name) for each in batches]
        assert names == [reference for reference, _ in workers[0].had]
        moved = batches[2].to("cpu")
        assert (moved[REFERENCE].name, moved.number) == (batches[2][REFERENCE].name, 2)
        names = [kv.ragged.IdsReference(0, each[REFERENCE].name, each.samples) for each in batches]
        one._resend(names[2])
        assert workers[0].had[3] == workers[0].had[2]
        one._released.extend(names[:2])
        one._release()
        with pytest.raises(RefusedError, match="not done with"):
            one._resend(names[0])
        one._resend(names[2])
        one.close()
        service.close()
