"""The registry: who is there, who is lost, who has left; and how addresses are found."""

import os
import signal
import sys
import threading
import time
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram, run_forked
from free_ports import free_port, unanswered_address

from karvan.discovery.directory import Directory, Membership, StaticDirectory, directory_from_environment
from karvan.discovery.registry import Registry
from karvan.job.roles import Role
from karvan.wire import RefusedError, Security, WireError

MEMBER = """
import sys, threading
from karvan.discovery.directory import Membership
Membership(sys.argv[1], "parameter-server", 0, sys.argv[2], beat=0.1)
print("there", flush=True)
threading.Event().wait()
"""


def wait_for(condition, seconds=60.0):
    due = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < due, "waited in vain"
        time.sleep(0.01)
    return value


@pytest.fixture
def registry():
    one = Registry()
    yield one
    one.close()


@pytest.fixture
def directory(registry):
    one = Directory(registry.address)
    yield one
    one.close()


def start_member(registry, address):
    process = ForkedProgram([sys.executable, "-c", MEMBER, registry.address, address], stdout=PIPE)
    assert process.stdout.readline() == "there\n"
    return process


def test_a_member_is_found_until_it_leaves(registry, directory):
    assert registry.healthy(Role.LOADER, 1) is None
    member = Membership(registry.address, "loader", 1, "10.0.0.1:5")
    assert registry.healthy(Role.LOADER, 1) is True
    assert directory.find("loader", 1, 60) == "10.0.0.1:5"
    (known,) = registry.members()
    assert (known.role, known.index, known.pid, known.healthy) == ("loader", 1, os.getpid(), True)
    assert directory.members()[0].address == "10.0.0.1:5"
    member.leave()
    member.leave()
    assert registry.healthy(Role.LOADER, 1) is None
    assert registry.members() == []


def test_finding_waits_until_somebody_comes(registry, directory):
    found = []
    looking = threading.Thread(target=lambda: found.append(directory.find("parameter-server", 0, 60)))
    looking.start()
    members = [Membership(registry.address, "parameter-server", index, f"h:{index}") for index in (1, 0)]
    looking.join()
    assert found == ["h:0"]
    for member in members:
        member.leave()


def test_who_is_not_found_is_named_beside_those_who_are_there(registry, directory):
    member = Membership(registry.address, "parameter-server", 0, "h:1")
    with pytest.raises(WireError, match=r"parameter-server 2 .* found parameter-server 0 at h:1\."):
        directory.find("parameter-server", 2, 0.1)
    with pytest.raises(WireError, match=r"Expected trainer 0 at the registry 127.*"):
        directory.find("trainer", 0, 0.1)
    with pytest.raises(ValueError, match="parameter-server"):
        directory.find("server", 0)
    member.leave()


def test_a_member_that_is_killed_counts_as_lost_and_the_next_one_takes_its_place():
    registry = Registry(lost_after=0.5)
    directory = Directory(registry.address)
    process = start_member(registry, "h:1")
    try:
        assert directory.find("parameter-server", 0, 60) == "h:1"
        process.kill()
        wait_for(lambda: registry.healthy(Role.PARAMETER_SERVER, 0) is False)
        with pytest.raises(WireError, match="no heartbeat"):
            directory.find("parameter-server", 0, 0.1)
        member = Membership(registry.address, "parameter-server", 0, "h:2", beat=0.1)
        assert directory.find("parameter-server", 0, 60) == "h:2"
        member.leave()
    finally:
        process.kill()
        process.communicate()
        directory.close()
        registry.close()


def test_a_stopped_member_that_was_replaced_stays_silent(registry, directory):
    first = Membership(registry.address, "loader", 0, "h:1", beat=0.1)
    second = Membership(registry.address, "loader", 0, "h:2")
    wait_for(lambda: first.replaced)
    assert directory.find("loader", 0, 60) == "h:2"
    first.leave()
    assert registry.healthy(Role.LOADER, 0) is True
    second.leave()


def test_members_register_again_with_a_registry_that_was_restarted():
    port = free_port()
    registry = Registry(port=port)
    member = Membership(registry.address, "trainer", 0, "h:1", beat=0.1)
    directory = Directory(registry.address)
    assert directory.find("trainer", 0, 60) == "h:1"
    registry.close()
    again = Registry(port=port)
    assert directory.find("trainer", 0, 60) == "h:1"
    assert not member.replaced
    member.leave()
    directory.close()
    again.close()


FAILING = """
import logging, sys
from karvan.discovery.directory import Membership
logging.basicConfig(level="WARNING")
Membership(sys.argv[1], "trainer", 0, "h:1", beat=0.001)
raise KeyError("the real error")
"""


def test_the_last_line_of_a_process_that_fails_is_its_error(registry):
    command = [sys.executable, "-c", FAILING, registry.address]
    ended = run_forked(command)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "KeyError: 'the real error'"


def test_a_process_of_an_older_generation_cannot_take_a_place(registry):
    registry.begin_generation(3)
    member = Membership(registry.address, "trainer", 0, "h:1", generation=3)
    assert registry.members()[0].generation == 3
    with pytest.raises(RefusedError, match="generation 3, got 2"):
        Membership(registry.address, "trainer", 0, "h:2", generation=2)
    assert registry.members()[0].address == "h:1"
    member.leave()


def test_a_trainer_may_be_silent_longer_than_others():
    registry = Registry(lost_after=0.5)
    trainer = Membership(registry.address, "trainer", 0, "h:1", beat=100)
    loader = Membership(registry.address, "loader", 0, "h:2", beat=100)
    wait_for(lambda: registry.healthy(Role.LOADER, 0) is False)
    assert registry.healthy(Role.TRAINER, 0) is True
    wait_for(lambda: registry.healthy(Role.TRAINER, 0) is False)
    trainer.leave()
    loader.leave()
    registry.close()


def test_a_registry_that_is_not_there_is_named_in_time():
    with unanswered_address() as address:
        with pytest.raises(WireError, match="registry"):
            Membership(address, "trainer", 0, "h:1", patience=0.3)
        with pytest.raises(WireError, match="registry"):
            Directory(address).find("trainer", 0, 0.3)


def test_wrong_members_are_refused(registry):
    with pytest.raises(RefusedError, match="parameter-server"):
        Membership(registry.address, "cook", 0, "h:1")
    with pytest.raises(RefusedError, match="index"):
        Membership(registry.address, "trainer", -1, "h:1")


def test_the_registry_asks_for_the_token_and_members_show_it():
    security = Security(token="secret")
    registry = Registry(security=security)
    with pytest.raises(RefusedError, match="token"):
        Membership(registry.address, "trainer", 0, "h:1")
    member = Membership(registry.address, "trainer", 0, "h:1", security)
    directory = Directory(registry.address, security)
    assert directory.find("trainer", 0) == "h:1"
    directory.close()
    member.leave()
    registry.close()


def test_a_static_directory_has_the_same_answers():
    static = StaticDirectory({"parameter-server": ["a:1", "b:2"]})
    assert static.find("parameter-server", 1, 0.1) == "b:2"
    assert static.find("parameter-server", 0) == "a:1"
    with pytest.raises(WireError, match=r"parameter-server 2 .* parameter-server 0 at a:1"):
        static.find("parameter-server", 2)
    with pytest.raises(WireError, match=r"loader 0 .* found none"):
        static.find("loader", 0)
    with pytest.raises(ValueError, match="got 'cook'"):
        StaticDirectory({"cook": []})


def test_the_environment_says_where_to_look(registry, tmp_path):
    member = Membership(registry.address, "trainer", 0, "h:1")
    found = directory_from_environment({"KARVAN_REGISTRY": registry.address})
    assert found.find("trainer", 0) == "h:1"
    found.close()
    member.leave()
    static = directory_from_environment(
        {"KARVAN_PARAMETER_SERVER_ADDRESSES": "a:1, b:2", "KARVAN_LOADER_ADDRESSES": "c:3"}
    )
    assert [static.find("parameter-server", index) for index in (0, 1)] == ["a:1", "b:2"]
    assert static.find("loader", 0) == "c:3"
    with pytest.raises(ValueError, match="KARVAN_REGISTRY"):
        directory_from_environment({})


def test_a_member_that_is_stopped_for_a_while_comes_back():
    registry = Registry(lost_after=0.5)
    process = start_member(registry, "h:1")
    try:
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: registry.healthy(Role.PARAMETER_SERVER, 0) is False)
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: registry.healthy(Role.PARAMETER_SERVER, 0) is True)
        (known,) = registry.members()
        assert (known.address, known.pid, known.healthy) == ("h:1", process.pid, True)
    finally:
        process.kill()
        process.communicate()
        registry.close()


def test_a_member_says_how_many_processes_its_role_has(registry, directory):
    unknowing = Membership(registry.address, "loader", 0, "h:1")
    assert [each.count for each in registry.members()] == [0]
    with pytest.raises(WireError, match="Expected a parameter-server at the registry"):
        directory.count("parameter-server", 0.1)
    with pytest.raises(WireError, match="Expected a loader"):
        directory.count("loader", 0.1)
    member = Membership(registry.address, "parameter-server", 1, "h:2", count=3)
    assert directory.count("parameter-server", 5.0) == 3
    for each in (unknowing, member):
        each.leave()
