"""Which columns go to a GPU, and where a feed's thread works; tests/gpu has the copies themselves."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import karvan as kv
from karvan.store import MemoryStore
from karvan.train.device_placement import host_columns
from karvan.train.feed import feed

GPU = torch.device("cuda", 0)


class GpuStore(MemoryStore):
    """Says that its rows are on a GPU."""

    device = GPU


class Model(nn.Module):
    def __init__(self, stores, features=()):
        super().__init__()
        self.engines = nn.ModuleList(
            kv.EmbeddingEngine({name: kv.Table(4) for name in names}, store=store())
            for names, store in stores
        )
        self.features = kv.FeatureEngine(features) if features else None


def test_stores_are_on_the_cpu_unless_they_say_otherwise():
    assert MemoryStore().device == torch.device("cpu")
    assert GpuStore().device == GPU


@pytest.mark.parametrize(
    ("stores", "features", "expected"),
    [
        ([(["user", "item"], MemoryStore)], [], {"user", "item"}),
        ([(["user", "item"], GpuStore)], [], set()),
        ([(["user"], GpuStore), (["item"], MemoryStore)], [], {"item"}),
        ([(["user"], GpuStore), (["user", "item"], MemoryStore)], [], {"user", "item"}),
        ([(["user"], GpuStore)], [kv.Feature("price").log1p()], set()),
        ([(["user"], MemoryStore)], [kv.Feature("price").log1p()], {"user", "price"}),
        ([(["user"], GpuStore), (["item"], MemoryStore)], [kv.Feature("price").log1p()], {"item", "price"}),
        ([], [kv.Feature("price").log1p()], {"price"}),
        ([], [], set()),
    ],
)
def test_columns_stay_on_the_cpu_if_a_store_there_or_its_features_need_them(stores, features, expected):
    assert host_columns(Model(stores, features), GPU) == expected


def test_a_store_on_another_gpu_takes_its_ids_on_the_cpu():
    assert host_columns(Model([(["user"], GpuStore)]), torch.device("cuda", 1)) == {"user"}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_feed_takes_and_places_batches_in_its_context_on_its_own_thread(prefetch):
    inside = threading.local()

    @contextmanager
    def within():
        inside.yes = True
        try:
            yield
        finally:
            inside.yes = False

    def data():
        for number in range(5):
            assert inside.yes
            yield number

    def place(number):
        assert inside.yes
        return number, threading.current_thread()

    with feed(data(), place, prefetch=prefetch, within=within) as batches:
        found = [fed.batch for fed in batches]
        assert not getattr(inside, "yes", False)
    assert [number for number, _ in found] == list(range(5))
    assert {thread is threading.current_thread() for _, thread in found} == {prefetch == 0}
