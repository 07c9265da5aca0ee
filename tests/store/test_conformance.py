"""The conformance tests of stores, on every store of this machine; tests/gpu has those of a GPU."""

import random

import pytest
from free_ports import free_port

SUITES = ["capture_conformance", "policy_conformance", "rows_conformance", "training_conformance"]
pytest.register_assert_rewrite(*SUITES)

from capture_conformance import CaptureConformance  # noqa: E402
from cluster_helpers import serving  # noqa: E402
from policy_conformance import PolicyConformance  # noqa: E402
from rows_conformance import RowsConformance  # noqa: E402
from store_kinds import DistinctKeysStore, StoreKind, make_cuda  # noqa: E402
from training_conformance import TrainingConformance  # noqa: E402

import karvan as kv  # noqa: E402
from karvan import distributed  # noqa: E402
from karvan.store import MemoryStore, ShardedStore  # noqa: E402

KINDS = [
    StoreKind("memory", MemoryStore),
    StoreKind("distinct keys", DistinctKeysStore, drops_rejected=True),
    StoreKind("sharded", lambda: ShardedStore(distributed.current())),
    StoreKind("cuda", make_cuda("cpu"), skips_rows=True, slow=True),
]


@pytest.fixture
def source():
    """Random numbers, the same every time."""
    return random.Random(1)


@pytest.fixture(scope="module")
def one_rank():
    """A connection of a single rank, as torchrun would start it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        kv.connect("sharded")
        yield
        distributed.disconnect()


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    if request.param.name == "sharded":
        request.getfixturevalue("one_rank")
    return request.param


class TestRows(RowsConformance):
    pass


class TestPolicies(PolicyConformance):
    pass


class TestCaptures(CaptureConformance):
    pass


class TestTraining(TrainingConformance):
    pass


def test_training_on_a_parameter_server():
    """Rows at a real server, over a real socket: what a synchronous trainer sees is what memory gives."""
    kind = StoreKind("remote", lambda: None, drops_rejected=True)  # the engine takes that of the connection
    with serving(1) as addresses:
        kv.connect("remote", servers=addresses)
        suite = TestTraining()
        suite.test_every_combiner_with_and_without_weights(kind)
        suite.test_every_optimizer(kind, "adam")
