"""The conformance tests of stores on a GPU; what compares with memory needs the native core."""

import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from capture_conformance import CaptureConformance
from device_conformance import DeviceConformance
from policy_conformance import PolicyConformance
from rows_conformance import RowsConformance
from store_kinds import StoreKind, make_cuda
from training_conformance import TrainingConformance


@pytest.fixture
def kind():
    # Kernels are compiled for each shape and rule, so that tests take few of them, as on a slow store.
    return StoreKind("cuda", make_cuda("cuda"), skips_rows=True, slow=True)


@pytest.fixture
def source():
    """Random numbers, the same every time."""
    return random.Random(1)


@pytest.fixture
def poison():
    """Fill the memory that torch's allocator hands out next, in blocks small and large, with NaN."""

    def fill():
        sizes = [1 << bits for bits in range(9, 25)]
        held = [torch.full((size // 4,), float("nan"), device="cuda") for size in sizes for _ in range(8)]
        torch.cuda.synchronize()
        del held

    yield fill
    torch.cuda.empty_cache()


class TestRows(RowsConformance):
    pass


class TestPolicies(PolicyConformance):
    pass


class TestCaptures(CaptureConformance):
    pass


class TestTraining(TrainingConformance):
    pass


class TestDevice(DeviceConformance):
    pass
