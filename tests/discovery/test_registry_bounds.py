"""The registry knows how many members a job has, and takes no more."""

import contextlib

import pytest
from neighbour import needs_root, run_as_neighbour

from karvan.discovery.directory import Directory, Membership
from karvan.discovery.registry import Registry
from karvan.wire import Client, RefusedError

MEMBER = {"role": "loader", "index": 0, "address": "h:1", "generation": 0, "pid": 1, "process": "p"}
FLOOD = """
peer = Client("registry", sys.argv[1], forgetful=True)
member = {"role": "loader", "address": "h:1", "generation": 0, "pid": 1, "process": "p"}
pending, refused = [], 0
for index in range(int(sys.argv[2])):
    pending.append(peer.begin("register", {**member, "index": index}))
    if len(pending) == 1000 or index == int(sys.argv[2]) - 1:
        for reply in pending:
            try:
                reply.wait()
            except RefusedError:
                refused += 1
        pending = []
print(refused)
"""


@pytest.fixture
def registry():
    with contextlib.closing(Registry(replicas={"trainer": 1, "parameter-server": 2})) as made:
        yield made


def register(registry, **given):
    with contextlib.closing(Client("registry", registry.address, forgetful=True)) as peer:
        peer.call("register", {**MEMBER, **given}, deadline=60)


def test_the_replicas_of_the_job_may_register_and_no_others(registry):
    register(registry, role="trainer")
    register(registry, role="parameter-server", index=1)
    with pytest.raises(RefusedError, match="parameter-server from 0 to 1, got 2"):
        register(registry, role="parameter-server", index=2)
    with pytest.raises(RefusedError, match="no loader, got 0"):
        register(registry, role="loader")
    assert len(registry.members()) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"address": "h" * 301},
        {"address": ""},
        {"address": "a b"},
        {"address": "new\nline:1"},
        {"process": "p" * 65},
        {"index": 2**70},
        {"index": -1},
        {"index": True},
        {"pid": 2**70},
        {"pid": -1},
        {"role": "cook"},
    ],
)
def test_a_registration_is_bounded_in_every_part(registry, given):
    with pytest.raises(RefusedError):
        register(registry, **{**MEMBER, "role": "trainer", **given})
    assert registry.members() == []


def test_a_refused_registration_replaces_nobody(registry):
    member = Membership(registry.address, "trainer", 0, "h:1")
    with pytest.raises(RefusedError):
        register(registry, role="trainer", address="x" * 301)
    with contextlib.closing(Directory(registry.address)) as directory:
        assert directory.find("trainer", 0, 5) == "h:1"
    member.leave()


def test_a_flood_of_registrations_leaves_the_answer_small():
    with contextlib.closing(Registry()) as registry:
        for index in (0, 1023):
            register(registry, index=index)
        with pytest.raises(RefusedError, match="loader from 0 to 1023, got 1024"):
            register(registry, index=1024)


@needs_root
@pytest.mark.slow
def test_another_user_cannot_fill_the_registry():
    """Even of a job that was started without a token."""
    replicas = {"trainer": 1, "parameter-server": 2, "loader": 3}
    with contextlib.closing(Registry(replicas=replicas)) as registry:
        assert run_as_neighbour(FLOOD, registry.address, 100_000) == "99997\n"
        with contextlib.closing(Directory(registry.address)) as directory:
            assert len(directory.members()) == 3
