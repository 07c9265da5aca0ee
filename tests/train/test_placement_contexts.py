"""Where a model is on another device than its tables, a forward moves ids and vectors between them."""

import torch

import karvan as kv
from karvan.train.device_placement import make_placement
from karvan.train.types import same


class Stream:
    """A stream of a device that is not there."""

    def __init__(self, device):
        self.device = device


def test_a_forward_of_a_model_on_a_gpu_moves_the_vectors_of_tables_in_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
    placement = make_placement(torch.nn.Sequential(engine), torch.device("cuda", 0), same, [engine])
    with placement.forward():
        assert len(engine._forward_pre_hooks) == len(engine._forward_hooks) == 1
    assert not engine._forward_pre_hooks
    assert not engine._forward_hooks


def test_a_forward_of_a_model_in_memory_moves_nothing():
    engine = kv.EmbeddingEngine({"user": kv.Table(dim=4)})
    placement = make_placement(torch.nn.Sequential(engine), torch.device("cpu"), same, [engine])
    with placement.forward():
        assert not engine._forward_hooks
