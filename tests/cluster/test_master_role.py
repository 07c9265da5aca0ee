"""`karvan role master`: registry and ledger at one address, which outlive the death of the process."""

import os
import re
import sys
from subprocess import PIPE

import pytest
from forked_programs import ForkedProgram
from free_ports import free_port
from wire_helpers import wait_for

from karvan.data.work_client import WorkClient
from karvan.discovery.directory import Directory, Membership
from karvan.work.task import TaskKind, WorkSpec

SPEC = WorkSpec((("f", 10),), 3)


@pytest.fixture
def start_master(tmp_path):
    """start_master(port) starts one with its ledger in tmp_path/run; returns it when it listens."""
    started = []

    def start(port=0, folder="run", wait=True):
        command = [sys.executable, "-m", "karvan", "role", "master", "--port", str(port)]
        command += ["--checkpoints", str(tmp_path / folder)] if folder else []
        master = ForkedProgram(command, stderr=PIPE)
        started.append(master)
        if wait:
            found = (re.search(r"master at (\S+),", line) for line in master.stderr)
            master.address = next(filter(None, found))[1]
        return master

    yield start
    for master in started:
        master.kill()
        master.communicate()


def test_members_and_holders_find_a_master_that_was_killed_and_started_again(start_master):
    port = free_port()
    first = start_master(port)
    member = Membership(first.address, "loader", 0, "h:1", beat=0.1)
    client = WorkClient(first.address, "trainer 0")
    client.open(SPEC)
    one, two = client.lease(most=2)
    assert client.acknowledge({one.token: 3, two.token: 1}) == []
    first.kill()
    first.wait()
    again = start_master(port)
    assert client.acknowledge({two.token: 2}) == []
    client.give_back([two.token])
    (rest,) = client.lease()
    assert (rest.task.first, rest.task.done, rest.token > two.token) == (3, 2, True)
    directory = Directory(again.address)
    wait_for(lambda: [each.address for each in directory.members()] == ["h:1"])
    directory.close()
    member.leave()
    client.close()


def test_a_master_that_is_stopped_leaves_the_ledger_to_the_next(start_master, tmp_path):
    master = start_master()
    client = WorkClient(master.address, "trainer 0")
    client.open(SPEC)
    (lease,) = client.lease([TaskKind.TRAIN])
    client.acknowledge({lease.token: 3})
    client.close()
    master.terminate()
    assert master.wait(60) == 0
    assert sorted(os.listdir(tmp_path / "run" / "master")) == ["work.db"]
    client = WorkClient(start_master().address, "trainer 0")
    assert client.lease()[0].task.first == 3
    client.close()


def test_a_second_master_for_the_same_folder_is_refused_with_code_2(start_master):
    start_master()
    second = start_master(wait=False)
    assert second.wait(60) == 2
    assert re.search(r"error: .*(another|other).*run", second.stderr.read(), re.DOTALL)


def test_a_master_has_no_registry_but_is_one(start_master, monkeypatch):
    monkeypatch.setenv("KARVAN_REGISTRY", "127.0.0.1:1")
    master = start_master(wait=False)
    assert master.wait(60) == 2
    assert "error: A master is the registry of its job" in master.stderr.read()


def test_a_master_needs_a_folder(start_master):
    master = start_master(folder=None, wait=False)
    assert master.wait(60) == 2
    assert "error: A master expects the folder of the job's checkpoints" in master.stderr.read()
