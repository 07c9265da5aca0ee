"""The conformance tests of stores, on every store of this machine; tests/gpu has those of a GPU."""

import random

import pytest

SUITES = ["capture_conformance", "policy_conformance", "rows_conformance", "training_conformance"]
pytest.register_assert_rewrite(*SUITES)

from capture_conformance import CaptureConformance  # noqa: E402
from policy_conformance import PolicyConformance  # noqa: E402
from rows_conformance import RowsConformance  # noqa: E402
from store_kinds import DistinctKeysStore, StoreKind, make_cuda  # noqa: E402
from training_conformance import TrainingConformance  # noqa: E402

from karvan.store import MemoryStore  # noqa: E402

KINDS = [
    StoreKind("memory", MemoryStore),
    StoreKind("distinct keys", DistinctKeysStore, drops_rejected=True),
    StoreKind("cuda", make_cuda("cpu"), skips_rows=True, slow=True),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture
def source():
    """Random numbers, the same every time."""
    return random.Random(1)


@every_kind
class TestRows(RowsConformance):
    pass


@every_kind
class TestPolicies(PolicyConformance):
    pass


@every_kind
class TestCaptures(CaptureConformance):
    pass


@every_kind
class TestTraining(TrainingConformance):
    pass
