"""`CudaStore` in Triton's interpreter; tests/gpu runs the same on a GPU."""

import random

import pytest
import torch
from device_conformance import DeviceConformance
from store_kinds import StoreKind, make_cuda


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
