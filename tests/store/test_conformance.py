"""The conformance tests of stores, on every store of this machine; tests/gpu has those of a GPU."""

import pytest

SUITES = ["training_conformance"]
pytest.register_assert_rewrite(*SUITES)

from store_kinds import DistinctKeysStore, StoreKind, make_cuda  # noqa: E402
from training_conformance import TrainingConformance  # noqa: E402

from karvan.store import MemoryStore  # noqa: E402

KINDS = [
    StoreKind("memory", MemoryStore),
    StoreKind("distinct keys", DistinctKeysStore),
    StoreKind("cuda", make_cuda("cpu"), skips_rows=True, slow=True),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@every_kind
class TestTraining(TrainingConformance):
    pass
