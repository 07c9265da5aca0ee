"""`CudaStore` in Triton's interpreter; tests/gpu runs the same on a GPU."""

import random

import pytest
import torch
from device_conformance import DeviceConformance
from store_kinds import StoreKind, make_cuda

import karvan as kv
from karvan.native import RULES
from karvan.store.cuda import updates


@pytest.fixture
def kind():
    return StoreKind("cuda", make_cuda("cpu"), skips_rows=True, slow=True)


@pytest.fixture
def source():
    """Random numbers, the same every time."""
    return random.Random(1)


@pytest.fixture
def poison():
    """Have torch fill memory that it allocates."""
    before = torch.are_deterministic_algorithms_enabled()
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(before)


class TestDevice(DeviceConformance):
    pass


def test_a_rule_without_a_formula_in_the_kernels_is_an_error(kind, monkeypatch):
    """In the table of rules, and not yet in `apply_rule`."""
    monkeypatch.setitem(updates._KERNEL_RULES, "sgd", {"RULE": len(RULES), "STATE": 0, "ROW_STATE": 0})
    engine = kv.EmbeddingEngine({"a": kv.Table(3)}, store=kind.make())
    optimizer = kv.optim.SGD(engine)
    engine({"a": torch.arange(3)})["a"].sum().backward()
    with pytest.raises(Exception, match="a rule has no formula on the GPU"):
        optimizer.step()
