"""The conformance tests of stores, on every store of this machine; tests/gpu has those of a GPU."""

import random

import pytest
from capture_conformance import CaptureConformance
from cluster_helpers import serving
from free_ports import free_port
from policy_conformance import PolicyConformance
from rows_conformance import RowsConformance
from store_kinds import DistinctKeysStore, StoreKind, make_cuda, make_sharded_cuda, make_tiered
from training_conformance import TrainingConformance

import karvan as kv
from karvan import distributed
from karvan.store import MemoryStore, ShardedStore

KINDS = [
    StoreKind("memory", MemoryStore),
    StoreKind("distinct keys", DistinctKeysStore, drops_rejected=True),
    StoreKind("sharded", lambda: ShardedStore(distributed.current())),
    StoreKind("cuda", make_cuda("cpu"), skips_rows=True, slow=True),
    StoreKind("tiered cuda", make_tiered("cpu"), skips_rows=True, slow=True),
    StoreKind("sharded cuda", make_sharded_cuda("cpu"), skips_rows=True, slow=True),
]
SLOW_KINDS = {  # the tests of each that are not slow
    "sharded cuda": set(),
    "tiered cuda": {
        "test_special_keys_and_hashes",
        "test_optimizer_state_is_kept_or_replaced",
        "test_gradients_of_rows_that_were_erased_between_two_passes",
        "test_stats_count_what_happened",
    },
}


SLOW_ON_A_DEVICE = {  # in the interpreter
    "test_rounding_to_16_bits_has_no_bias",
    "test_any_operations",
    "test_counters_of_the_filter_stop_at_255_and_move",
    "test_a_full_table_reuses_its_memory",
    "test_growth_over_many_steps",
    "test_a_feature_that_reads_alone_and_lists_of_lists_beside_features_that_train",
    "test_one_key_a_thousand_times_and_a_thousand_keys_once",
    "test_deltas_in_a_folder_are_read_by_memory",
    "test_snapshot_parts_make_up_the_whole_and_load_elsewhere",
}


def pytest_generate_tests(metafunc):
    """Every test runs on every kind of store."""
    if "kind" in metafunc.fixturenames:
        name = metafunc.function.__name__
        slow = {each.name: each.slow and name in SLOW_ON_A_DEVICE for each in KINDS}
        slow |= {each: name not in quick for each, quick in SLOW_KINDS.items()}
        marks = {True: pytest.mark.slow, False: ()}
        params = [pytest.param(each, marks=marks[slow[each.name]], id=each.name) for each in KINDS]
        metafunc.parametrize("kind", params, indirect=True)


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


@pytest.fixture
def kind(request):
    if request.param.name.startswith("sharded"):
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
