"""Tables with a capacity on a GPU: a lookup does not wait to learn whether rows must go."""

import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import karvan as kv
from karvan.store.cuda.store import CudaStore

CAPACITY = 100_000
_CYCLES = 2_000_000_000  # of a GPU that sleeps, about a second


def rows_after_training(watch):
    """Train beyond the capacity; watch: lookups must return while the device still sleeps."""
    engine = kv.EmbeddingEngine({"f": kv.Table(16, evict=kv.eviction.LRU(CAPACITY))}, store=CudaStore("cuda"))
    optimizer = kv.optim.SGD(engine, lr=0.1)
    batch = 20_000
    for step in range(8):  # the last three are beyond the capacity
        keys = torch.arange(step * batch, (step + 1) * batch, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(_CYCLES if watch else 1)
        before = time.perf_counter()
        out = engine({"f": keys})["f"]
        took = time.perf_counter() - before
        waited = torch.cuda.current_stream().record_event().query()
        out.sum().backward()
        optimizer.step()
        # The first lookup allocates page-locked memory.
        assert not (watch and step and waited), f"the lookup of step {step} took {took:.2f} s"
        rows = engine.table("f").stats()["rows"]
        assert rows <= CAPACITY
    return rows


def test_a_lookup_returns_before_the_device_has_done_it():
    assert rows_after_training(watch=False) > CAPACITY * 7 // 8  # compiles the kernels
    assert rows_after_training(watch=True) > CAPACITY * 7 // 8
