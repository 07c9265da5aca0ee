"""The generation of a job is what its registry says; nobody else can raise it."""

import contextlib
import json

import pytest
from cluster_helpers import Processes
from neighbour import needs_root, run_as_neighbour

from karvan.cluster.embedding_worker.service import EmbeddingWorker
from karvan.cluster.loader.epoch_service import EpochService
from karvan.cluster.parameter_server.service import ParameterServer
from karvan.cluster.role_process import Generations
from karvan.discovery.directory import Membership
from karvan.discovery.registry import Registry
from karvan.wire import Client, RefusedError, Server

HUGE = 10**9
WHO = {"trainer": 0, "trainers": 1, "run": "a"}
TRAINER = {**WHO, "staleness": 1, "grad_reduce": "mean", "servers": 1, "divisor": 1}
NEEDS = {"kind": "control", "ids": [], "epoch": 0, "next": 0, "taken": [], "end": None, "positions": []}
NEEDS |= {"unfinished": [], "before_unfinished": None}
SERVICES = {
    "parameter server": (ParameterServer, {**TRAINER, "server": 0}),
    "embedding worker": (EmbeddingWorker, {**TRAINER, "worker": 0}),
    "loader": (EpochService, {**WHO, "loader": 0, "loaders": 1, **NEEDS}),
}


@pytest.fixture(autouse=True)
def _servers(monkeypatch):
    monkeypatch.setenv("KARVAN_PARAMETER_SERVER_ADDRESSES", "127.0.0.1:1")  # whom a worker would call later


@pytest.fixture
def registry():
    with contextlib.closing(Registry()) as made:
        yield made


def come(server, hello, generation):
    """Say hello to a service, as a trainer of that generation, and be answered."""
    peer = Client("service", server.address, hello={**hello, "generation": generation})
    with contextlib.closing(peer):
        peer.call("ping", deadline=60)


@pytest.mark.parametrize("name", SERVICES)
def test_a_generation_that_the_registry_does_not_confirm_locks_nobody_out(registry, name):
    kind, hello = SERVICES[name]
    with Server(kind(generations=Generations(registry.address))) as server:
        come(server, hello, 0)
        with pytest.raises(RefusedError, match=f"generation 0, as the registry says, got {HUGE}"):
            come(server, hello, HUGE)
        come(server, hello, 0)


@pytest.mark.parametrize("name", SERVICES)
def test_a_generation_that_the_launcher_has_begun_is_the_only_one(registry, name):
    kind, hello = SERVICES[name]
    with Server(kind(generations=Generations(registry.address))) as server:
        come(server, hello, 0)
        registry.begin_generation(3)
        with pytest.raises(RefusedError, match="generation 3, as the registry says, got 2"):
            come(server, hello, 2)
        come(server, {**hello, "run": "b"}, 3)
        with pytest.raises(RefusedError, match="generation 3"):
            come(server, hello, 0)


@pytest.mark.parametrize("name", SERVICES)
def test_without_a_registry_the_generation_is_that_of_the_start(name):
    kind, hello = SERVICES[name]
    with Server(kind(generations=Generations(requested=2))) as server:
        come(server, hello, 2)
        for other in (1, 3, HUGE):
            with pytest.raises(
                RefusedError, match=f"generation 2, as when this service started, got {other}"
            ):
                come(server, hello, other)


@pytest.mark.parametrize("given", [None, True, 1.0, "0", -1])
def test_what_is_no_generation_is_refused(given):
    with pytest.raises(RefusedError, match="generation"):
        Generations().check(given)


def test_a_registry_that_is_gone_refuses_newer_generations_only():
    with contextlib.closing(Registry()) as registry:
        known = Generations(registry.address, patience=0.5)
        assert known.check(0) == 0
    assert known.check(0) == 0
    with pytest.raises(RefusedError, match=r"the registry at .* to confirm generation 1"):
        known.check(1)


def test_a_member_of_a_generation_that_has_not_begun_is_refused(registry):
    with pytest.raises(RefusedError, match=f"generation 0 or an older one, got {HUGE}"):
        Membership(registry.address, "trainer", 0, "h:1", generation=HUGE)
    Membership(registry.address, "trainer", 0, "h:1").leave()


def test_a_generation_never_goes_back(registry):
    registry.begin_generation(2)
    with pytest.raises(ValueError, match="generation 2 or a later one, got 1"):
        registry.begin_generation(1)


RAISE = """
import json
try:
    Client("server", sys.argv[1], hello=json.loads(sys.argv[2])).call("describe", deadline=60)
    print("raised")
except RefusedError as error:
    print("refused:", error)
"""


@needs_root
def test_another_user_cannot_raise_the_generation_of_a_running_job():
    """Even of one that was started without a token."""
    with Processes(1) as job:
        [member] = job.registry.members()
        hello = json.dumps({**TRAINER, "server": 0, "run": "x", "generation": HUGE})
        said = run_as_neighbour(RAISE, member.address, hello)
        assert f"generation 0, as the registry says, got {HUGE}" in said
        come(member, {**TRAINER, "server": 0}, 0)
